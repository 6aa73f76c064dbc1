// One block: there are at most a few thousand numbers.

#include "launch.h"
#include "megacore/base/check.h"
#include "megacore/cuda/echo_counts.h"
#include "row_io.cuh"

namespace megacore::cuda {
namespace {

struct SumOf {
  __device__ int64_t operator()(int64_t a, int64_t b) const { return a + b; }
};
struct LargerOf {
  __device__ int64_t operator()(int64_t a, int64_t b) const { return a > b ? a : b; }
};

// All threads of the block call it; every one gets the result.
template <typename Combine>
__device__ __forceinline__ int64_t over_block(int64_t value, Combine combine, int64_t* of_warps) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  if (thread % kWarp == 0) {
    of_warps[thread / kWarp] = value;
  }
  __syncthreads();
  int64_t result = of_warps[0];
  for (int warp = 1; warp < kRowThreads / kWarp; ++warp) {
    result = combine(result, of_warps[warp]);
  }
  __syncthreads();  // before the next values are written
  return result;
}

__global__ void __launch_bounds__(kRowThreads) count_plan_kernel(moe::PlanShape shape,
                                                                 moe::EchoReport report,
                                                                 const int64_t* slot_expert,
                                                                 const int64_t* copies_of_place,
                                                                 int64_t* copies,
                                                                 double* sums) {
  __shared__ int64_t of_warps[kRowThreads / kWarp];
  for (int64_t expert = threadIdx.x; expert < shape.num_experts; expert += kRowThreads) {
    copies[expert] = moe::copies_of_expert(shape, slot_expert, copies_of_place, expert);
  }
  int64_t highest = 0;
  int64_t total = 0;
  for (int64_t rank = threadIdx.x; rank < shape.num_ranks; rank += kRowThreads) {
    highest = LargerOf{}(highest, report.load_before[rank]);
    total += report.load_before[rank];
  }
  highest = over_block(highest, LargerOf{}, of_warps);
  total = over_block(total, SumOf{}, of_warps);
  if (threadIdx.x == 0) {
    moe::add_report(shape, report, highest, total, sums);
  }
}

__global__ void __launch_bounds__(kRowThreads) count_held_kernel(const int64_t* slot_expert,
                                                                 int64_t numel,
                                                                 int64_t first,
                                                                 int64_t end,
                                                                 int64_t bytes,
                                                                 double* sums) {
  __shared__ int64_t of_warps[kRowThreads / kWarp];
  int64_t held = 0;
  for (int64_t i = threadIdx.x; i < numel; i += kRowThreads) {
    held += slot_expert[i] >= first && slot_expert[i] < end ? 1 : 0;
  }
  held = over_block(held, SumOf{}, of_warps);
  if (threadIdx.x == 0) {
    sums[moe::kBytesSent] += static_cast<double>(held * bytes);
  }
}

}  // namespace

void count_plan(const moe::PlanShape& shape,
                const moe::EchoReport& report,
                const int64_t* slot_expert,
                const int64_t* copies_of_place,
                int64_t* copies,
                double* sums,
                cudaStream_t stream) {
  MC_REQUIRE(shape.num_ranks >= 1 && shape.num_experts % shape.num_ranks == 0 &&
                 shape.num_spare_slots >= 0,
             "{} experts do not divide over {} ranks", shape.num_experts, shape.num_ranks);
  launch("count_plan", count_plan_kernel, {.blocks = 1, .threads = kRowThreads}, stream, shape,
         report, slot_expert, copies_of_place, copies, sums);
}

void count_held(const int64_t* slot_expert,
                int64_t numel,
                int64_t first,
                int64_t end,
                int64_t bytes,
                double* sums,
                cudaStream_t stream) {
  launch("count_held", count_held_kernel, {.blocks = 1, .threads = kRowThreads}, stream,
         slot_expert, numel, first, end, bytes, sums);
}

}  // namespace megacore::cuda
