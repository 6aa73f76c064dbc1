// Rows of narrow floats, moved 16 bytes at a time and computed in fp32.
//
// A row of `width` elements is `vectors` packs. Threads of a block form groups of `lanes` threads;
// a group works on one row at a time, so that a warp always touches neighbouring bytes.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "megacore/cuda/float_type.h"
#include "megacore/moe/grouped_arguments.h"

namespace megacore::cuda {

inline constexpr int kRowThreads = 256;
inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffU;
inline constexpr int64_t kPackBytes = 16;

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(Bfloat16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}
__device__ __forceinline__ float widen(Float16 value) {
  return __half2float(__ushort_as_half(value.bits));
}

__device__ __forceinline__ void narrow(float value, float& to) { to = value; }
__device__ __forceinline__ void narrow(float value, Bfloat16& to) {
  to.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
__device__ __forceinline__ void narrow(float value, Float16& to) {
  to.bits = __half_as_ushort(__float2half_rn(value));
}

template <typename Float, int kNumel>
struct alignas(kNumel * sizeof(Float)) Pack {
  Float values[kNumel];
};

template <int kNumel, typename Float>
__device__ __forceinline__ Pack<Float, kNumel> load_pack(const Float* row, int64_t index) {
  return reinterpret_cast<const Pack<Float, kNumel>*>(row)[index];
}
template <typename Float, int kNumel>
__device__ __forceinline__ void store_pack(Float* row,
                                           int64_t index,
                                           const Pack<Float, kNumel>& pack) {
  reinterpret_cast<Pack<Float, kNumel>*>(row)[index] = pack;
}

// Loads that a thread issues before it uses the first, to cover the latency of memory or of a link.
inline constexpr int kLoadsInFlight = 4;

// Copies words, consecutive in both places; the threads of the whole grid share the work.
template <typename Word>
__device__ __forceinline__ void copy_words(Word* to, const Word* from, int64_t words) {
  const int64_t step = int64_t{gridDim.x} * kRowThreads;
  int64_t first = int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
  // Through registers: the compiler cannot move a load above a store that may alias it.
  for (; first + (kLoadsInFlight - 1) * step < words; first += kLoadsInFlight * step) {
    Word loaded[kLoadsInFlight];
#pragma unroll
    for (int n = 0; n < kLoadsInFlight; ++n) {
      loaded[n] = from[first + n * step];
    }
#pragma unroll
    for (int n = 0; n < kLoadsInFlight; ++n) {
      to[first + n * step] = loaded[n];
    }
  }
  for (; first < words; first += step) {
    to[first] = from[first];
  }
}

// Sets words [begin, end) to one value; the threads of the whole grid share the work.
template <typename Word>
__device__ __forceinline__ void fill_words(Word* to,
                                           const Word& value,
                                           int64_t begin,
                                           int64_t end) {
  const int64_t step = int64_t{gridDim.x} * kRowThreads;
  for (int64_t i = begin + int64_t{blockIdx.x} * kRowThreads + threadIdx.x; i < end; i += step) {
    to[i] = value;
  }
}

// All lanes get the same sum: every step adds the same two numbers on both sides.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

// The sum over the kLanes threads of a row, the same in all of them. kLanes is a warp, or the
// whole block: then all its threads call it together.
template <int kLanes>
__device__ __forceinline__ float sum_over_row(float value, float* warp_sums) {
  value = warp_sum(value);
  if constexpr (kLanes == kWarp) {
    return value;
  } else {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread % kWarp == 0) {
      warp_sums[thread / kWarp] = value;
    }
    __syncthreads();
    float sum = 0.0F;
    for (int warp = 0; warp < kLanes / kWarp; ++warp) {
      sum += warp_sums[warp];
    }
    __syncthreads();  // before the next row writes its sums
    return sum;
  }
}

// Rows in use of `rows`: all, or as many as the device says.
__device__ __forceinline__ int64_t rows_in_use(const int64_t* num_rows, int64_t rows) {
  return num_rows == nullptr ? rows : moe::usable_count(*num_rows, rows);
}

// Where a thread stands among the groups of its grid.
struct Team {
  int64_t group;       // first row of this thread's group
  int64_t num_groups;  // step to its next row
  int lane;            // [0, lanes)
};

__device__ __forceinline__ Team team_of(int lanes) {
  const int thread = static_cast<int>(threadIdx.x);
  const int groups = kRowThreads / lanes;
  return {int64_t{blockIdx.x} * groups + thread / lanes, int64_t{gridDim.x} * groups,
          thread % lanes};
}

// ---- host side
// ---------------------------------------------------------------------------------

// A power of two in [1, kRowThreads]: the most threads that share a row of `vectors` packs evenly,
// else enough of them for a row that is short.
inline int lanes_for(int64_t vectors) {
  for (int lanes = kRowThreads; lanes >= kWarp; lanes /= 2) {
    if (vectors % lanes == 0) {
      return lanes;
    }
  }
  int lanes = 1;
  while (lanes < vectors && lanes < kRowThreads) {
    lanes *= 2;
  }
  return lanes;
}

inline bool is_packed(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kPackBytes == 0;
}

// Calls body.operator()<Float, pack>() for the element type: whole packs where rows and pointers
// allow it, single elements otherwise.
template <typename Float, typename Body>
void with_pack(bool are_aligned, int64_t width, Body&& body) {
  constexpr int kPack = static_cast<int>(kPackBytes / sizeof(Float));
  if (are_aligned && width % kPack == 0) {
    body.template operator()<Float, kPack>();
  } else {
    body.template operator()<Float, 1>();
  }
}

template <typename Body>
void with_float_type(FloatType type, bool are_aligned, int64_t width, Body&& body) {
  switch (type) {
    case FloatType::kFloat32:
      return with_pack<float>(are_aligned, width, body);
    case FloatType::kBfloat16:
      return with_pack<Bfloat16>(are_aligned, width, body);
    case FloatType::kFloat16:
      return with_pack<Float16>(are_aligned, width, body);
  }
}

inline int64_t bytes_of(FloatType type) { return type == FloatType::kFloat32 ? 4 : 2; }

}  // namespace megacore::cuda
