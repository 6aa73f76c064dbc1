// Two launches: every block sums its share, one block sums the shares. No atomics, so the order is
// fixed; a thread takes the same elements whether or not it may load four at once.

#include "launch.h"
#include "megacore/base/check.h"
#include "megacore/cuda/sum_of_squares.h"
#include "row_io.cuh"

namespace megacore::cuda {
namespace {

constexpr int kPack = 4;
constexpr int64_t kPacksPerThread = 8;  // in a small tensor; more in a large one

// The sum over the block, valid in its first thread.
__device__ __forceinline__ double sum_over_block(double value, double* warp_sums) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  if (thread % kWarp == 0) {
    warp_sums[thread / kWarp] = value;
  }
  __syncthreads();
  double sum = 0.0;
  for (int warp = 0; warp < kRowThreads / kWarp; ++warp) {
    sum += warp_sums[warp];
  }
  return sum;
}

__device__ __forceinline__ double square(float value) {
  return static_cast<double>(value) * static_cast<double>(value);
}

template <typename Float>
__global__ void __launch_bounds__(kRowThreads) squares_kernel(const Float* __restrict__ values,
                                                              int64_t numel,
                                                              bool are_aligned,
                                                              double* __restrict__ partial_sums) {
  __shared__ double warp_sums[kRowThreads / kWarp];
  const int64_t stride = int64_t{gridDim.x} * kRowThreads;
  double sum = 0.0;
#pragma unroll 4
  for (int64_t i = int64_t{blockIdx.x} * kRowThreads + threadIdx.x; i < numel / kPack;
       i += stride) {
    Pack<Float, kPack> pack;
    if (are_aligned) {
      pack = load_pack<kPack>(values, i);
    } else {
#pragma unroll
      for (int n = 0; n < kPack; ++n) {
        pack.values[n] = values[i * kPack + n];
      }
    }
#pragma unroll
    for (int n = 0; n < kPack; ++n) {
      sum += square(widen(pack.values[n]));
    }
  }
  if (blockIdx.x == 0 && threadIdx.x < numel % kPack) {
    sum += square(widen(values[numel / kPack * kPack + threadIdx.x]));
  }
  sum = sum_over_block(sum, warp_sums);
  if (threadIdx.x == 0) {
    partial_sums[blockIdx.x] = sum;
  }
}

__global__ void __launch_bounds__(kRowThreads)
    total_kernel(const double* __restrict__ partial_sums, int count, double* __restrict__ total) {
  __shared__ double warp_sums[kRowThreads / kWarp];
  double sum = 0.0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kRowThreads) {
    sum += partial_sums[i];
  }
  sum = sum_over_block(sum, warp_sums);
  if (threadIdx.x == 0) {
    *total = sum;
  }
}

}  // namespace

void sum_of_squares(const SumOfSquaresParams& params, cudaStream_t stream) {
  MC_REQUIRE(params.numel >= 0, "numel must be at least 0, got {}", params.numel);
  const int64_t wanted = divided_up(params.numel, kRowThreads * kPack * kPacksPerThread);
  const int64_t blocks = std::clamp(wanted, int64_t{1}, kSumBlocks);
  const bool are_aligned =
      reinterpret_cast<uintptr_t>(params.values) % (kPack * bytes_of(params.type)) == 0;
  with_float_type(params.type, are_aligned, kPack, [&]<typename Float, int>() {
    launch("sum_of_squares", squares_kernel<Float>, {.blocks = blocks, .threads = kRowThreads},
           stream, static_cast<const Float*>(params.values), params.numel, are_aligned,
           params.partial_sums);
  });
  launch("sum_of_squares", total_kernel, {.blocks = 1, .threads = kRowThreads}, stream,
         static_cast<const double*>(params.partial_sums), static_cast<int>(blocks), params.total);
}

}  // namespace megacore::cuda
