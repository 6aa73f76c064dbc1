// One block plans for everybody. Its 12 warps take one greedy run each, so that the four rules are
// raced in the time of the slowest; they share the shared memory of one multiprocessor.

#include "launch.h"
#include "megacore/base/check.h"
#include "megacore/cuda/plan_offload.h"
#include "row_io.cuh"
#include "system_memory.cuh"

namespace megacore::cuda {
namespace {

using moe::PlanMemory;
using moe::PlanShape;

constexpr int kThreads = 384;  // with more, registers would have to be spilled
constexpr int64_t kMostRuns = kThreads / kWarp;

struct DeviceWarp {
  __device__ int lane() const { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ int lanes() const { return kWarp; }

  // The high halves first; among lanes with the highest of them, the low halves.
  __device__ uint64_t max(uint64_t value) const {
    const auto high = static_cast<unsigned>(value >> 32);
    const unsigned top = __reduce_max_sync(kAllLanes, high);
    const unsigned low = high == top ? static_cast<unsigned>(value) : 0U;
    return uint64_t{top} << 32 | __reduce_max_sync(kAllLanes, low);
  }
  __device__ uint64_t min(uint64_t value) const { return ~max(~value); }
  __device__ int64_t sum(int64_t value) const {
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      value += __shfl_xor_sync(kAllLanes, value, distance);
    }
    return value;
  }
  __device__ int64_t before(bool flag, int64_t& total) const {
    const unsigned flags = __ballot_sync(kAllLanes, flag);
    total = __popc(flags);
    return __popc(flags & ((1U << lane()) - 1U));
  }
  __device__ int64_t sum_before(int64_t value, int64_t& total) const {
    int64_t sum = value;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int64_t other = __shfl_up_sync(kAllLanes, sum, static_cast<unsigned>(distance));
      sum += lane() >= distance ? other : 0;
    }
    total = __shfl_sync(kAllLanes, sum, kWarp - 1);
    return sum - value;
  }
  __device__ void sync() const { __syncwarp(); }
};

struct DeviceTeam {
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int threads() const { return kThreads; }
  __device__ int warp() const { return thread() / kWarp; }
  __device__ int warps() const { return kThreads / kWarp; }
  __device__ void sync() const { __syncthreads(); }
};

__global__ void __launch_bounds__(kThreads, 1)
    plan_kernel(PlanOffloadParams params, int64_t num_runs) {
  extern __shared__ int64_t memory[];
  const uint64_t start_ns = now_ns();
  moe::TeamPlanner<DeviceTeam, DeviceWarp>(DeviceTeam{}, DeviceWarp{}, params.shape, params.spec,
                                           PlanMemory(memory, params.shape, num_runs),
                                           params.counts, params.plan)
      .run();
  if (threadIdx.x == 0) {
    *params.elapsed_ns = static_cast<int64_t>(now_ns() - start_ns);
  }
}

int64_t bytes_for(const PlanShape& shape, int64_t num_runs) {
  return PlanMemory::words(shape, num_runs) * static_cast<int64_t>(sizeof(int64_t));
}

// Shared memory that a block of the current device may have: 227 KiB for capability 9.0, 163 for
// 8.0, 99 for 8.9 and 12.0.
int64_t shared_bytes_of_block() {
  int index = 0, bytes = 0;
  check(cudaGetDevice(&index), "asking for the current device");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
        "asking for the shared memory of a block");
  return bytes;
}

// As many runs at a time as there is memory for, but all rules at least.
int64_t runs_for(const PlanShape& shape, int64_t shared_bytes) {
  int64_t num_runs = kMostRuns;
  while (num_runs > moe::kNumRules && bytes_for(shape, num_runs) > shared_bytes) {
    num_runs = num_runs > 2 * moe::kNumRules ? num_runs / 2 : moe::kNumRules;
  }
  return num_runs;
}

void require_shape(const PlanShape& shape) {
  MC_REQUIRE(shape.num_ranks >= 1 && shape.num_experts >= shape.num_ranks &&
                 shape.num_experts % shape.num_ranks == 0 && shape.num_experts <= moe::kMaxExperts,
             "{} experts do not divide over {} ranks", shape.num_experts, shape.num_ranks);
}

}  // namespace

int64_t plan_offload_bytes(const PlanShape& shape) { return bytes_for(shape, moe::kNumRules); }

void plan_offload(const PlanOffloadParams& params, cudaStream_t stream) {
  const PlanShape& shape = params.shape;
  require_shape(shape);
  moe::require_spec(params.spec, shape.num_ranks);
  const int64_t shared_bytes = shared_bytes_of_block();
  const int64_t num_runs = runs_for(shape, shared_bytes);
  const int64_t bytes = bytes_for(shape, num_runs);
  MC_REQUIRE(bytes <= shared_bytes,
             "a plan for {} ranks, {} experts and {} spare slots takes {} bytes; the device "
             "planner has {}: plan on the CPU, or with fewer slots",
             shape.num_ranks, shape.num_experts, shape.num_spare_slots, bytes, shared_bytes);
  check(cudaFuncSetAttribute(plan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "asking for {} bytes of shared memory", bytes);
  launch("plan_offload", plan_kernel, {.blocks = 1, .threads = kThreads, .shared_bytes = bytes},
         stream, params, num_runs);
}

}  // namespace megacore::cuda
