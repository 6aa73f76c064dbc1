// Enough of CUDA to run our kernels on the CPU, one block after the other (kernels without shared
// variables also on two host threads, like two streams): a CUDA thread is a fiber, __syncthreads
// and the operations of a warp are barriers between them. Exact: what a kernel reads, writes and
// adds up is what it would on a GPU, and sanitizers see it.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "fibers.h"

// NOLINTBEGIN(bugprone-reserved-identifier): CUDA's own names
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other

using cudaError_t = int;
using cudaStream_t = void*;
inline constexpr cudaError_t cudaSuccess = 0;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}

// A device with two multiprocessors.
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin
};
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount            ? 2
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 227 * 1024
                                                                  : 0;
  return cudaSuccess;
}

struct dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
struct alignas(8) ushort4 {
  uint16_t x, y, z, w;
};
template <typename T>
T __ldg(const T* pointer) {
  return *pointer;
}
template <typename T>
T __ldcv(const T* pointer) {
  return *pointer;
}

namespace emulated {

// What the lanes of a warp tell each other.
struct Warp {
  FiberBarrier lanes{32};
  std::array<uint32_t, 32> low{};
  std::array<uint32_t, 32> high{};
};

struct Block {
  explicit Block(int threads, int64_t bytes = 0)
      : all(threads), warps(static_cast<size_t>(threads) / 32), memory((bytes + 7) / 8) {
    std::generate(warps.begin(), warps.end(), [] { return std::make_unique<Warp>(); });
  }
  FiberBarrier all;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<int64_t> memory;  // of the size that the launch asks for
  bool vote = true;
};

inline thread_local Block* block = nullptr;

}  // namespace emulated

inline thread_local dim3 threadIdx;
inline thread_local dim3 blockIdx;
inline thread_local dim3 gridDim;

namespace emulated {

inline Warp& warp() { return *block->warps[threadIdx.x / 32]; }
inline unsigned lane() { return threadIdx.x % 32; }

inline void wait_at(FiberBarrier& barrier) {
  const dim3 mine = threadIdx;
  barrier.arrive_and_wait();
  threadIdx = mine;
}

// Gives every lane what `pick` makes of the values of all.
template <typename T, typename Pick>
auto exchange(T value, Pick pick) {
  Warp& mine = warp();
  std::array<uint32_t, 2> bits{};
  static_assert(sizeof(T) <= sizeof(bits));
  std::memcpy(bits.data(), &value, sizeof(T));
  mine.low[lane()] = bits[0];
  mine.high[lane()] = bits[1];
  wait_at(mine.lanes);
  std::array<T, 32> values{};
  for (size_t i = 0; i < 32; ++i) {
    const std::array<uint32_t, 2> other = {mine.low[i], mine.high[i]};
    std::memcpy(&values[i], other.data(), sizeof(T));
  }
  wait_at(mine.lanes);  // before the next values are written
  return pick(values);
}

template <typename T, typename Is>
unsigned mask_of(const std::array<T, 32>& values, Is is) {
  unsigned mask = 0;
  for (unsigned i = 0; i < 32; ++i) {
    mask |= (is(values[i]) ? 1U : 0U) << i;
  }
  return mask;
}

}  // namespace emulated

inline void __syncthreads() { emulated::wait_at(emulated::block->all); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
template <typename T>
T atomicAdd(T* at, T value) {
  return std::atomic_ref<T>(*at).fetch_add(value);
}
inline void __syncwarp() { emulated::wait_at(emulated::warp().lanes); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int distance) {
  const unsigned from = emulated::lane() ^ static_cast<unsigned>(distance);
  return emulated::exchange(value, [from](const auto& values) { return values[from]; });
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulated::exchange(
      value, [lane](const auto& values) { return values[static_cast<size_t>(lane)]; });
}
template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned distance) {
  const unsigned lane = emulated::lane();
  const unsigned from = lane >= distance ? lane - distance : lane;
  return emulated::exchange(value, [from](const auto& values) { return values[from]; });
}
inline unsigned __ballot_sync(unsigned, bool is) {
  return emulated::exchange(is ? 1U : 0U, [](const auto& values) {
    return emulated::mask_of(values, [](unsigned value) { return value != 0; });
  });
}
inline unsigned __match_any_sync(unsigned, int value) {
  return emulated::exchange(value, [value](const auto& values) {
    return emulated::mask_of(values, [value](int other) { return other == value; });
  });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return emulated::exchange(
      value, [](const auto& values) { return *std::max_element(values.begin(), values.end()); });
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  return emulated::exchange(
      value, [](const auto& values) { return *std::min_element(values.begin(), values.end()); });
}

using std::max;
using std::min;
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __uint_as_float(unsigned bits) {
  float value = 0.0F;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
// NOLINTEND(bugprone-reserved-identifier)
