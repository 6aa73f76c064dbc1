// Every block sorts the row of the plan by expert for itself, which is less work than a launch, and
// then looks up the place of its copies, one per thread and turn. How many copies of its expert
// come before a copy is the distance of its sorted row from the first row of the expert.

#include "launch.h"
#include "megacore/base/check.h"
#include "megacore/cuda/reroute.h"
#include "row_io.cuh"

namespace megacore::cuda {
namespace {

using moe::PlanShape;
using moe::RerouteParts;

constexpr int kThreads = 512;
constexpr int64_t kCopiesPerThread = 4;
constexpr int64_t kMaxSharedBytes = 160 * 1024;

struct BlockTeam {
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int threads() const { return kThreads; }
};

// The first row of each expert, from how many each has: a scan by one warp.
__device__ __forceinline__ void find_first_rows(const int64_t* counts,
                                                int64_t num_experts,
                                                int64_t* first_row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int64_t before = 0;
  for (int64_t base = 0; base < num_experts; base += kWarp) {
    const int64_t expert = base + lane;
    const int64_t own = expert < num_experts ? counts[expert] : 0;
    int64_t sum = own;
#pragma unroll
    for (unsigned distance = 1; distance < kWarp; distance *= 2) {
      const int64_t other = __shfl_up_sync(kAllLanes, sum, distance);
      sum += lane >= static_cast<int>(distance) ? other : 0;
    }
    if (expert < num_experts) {
      first_row[expert] = before + sum - own;
    }
    before += __shfl_sync(kAllLanes, sum, kWarp - 1);
  }
}

__global__ void __launch_bounds__(kThreads) reroute_kernel(RerouteParams params) {
  extern __shared__ int64_t memory[];
  const PlanShape shape = params.row.shape;
  const RerouteParts parts = RerouteParts::at(memory, shape);
  int64_t* slot_expert = memory + RerouteParts::words(shape);
  int64_t* tokens = slot_expert + shape.num_slots();
  int64_t* first_row = tokens + shape.num_slots();
  for (int64_t i = threadIdx.x; i < shape.num_slots(); i += kThreads) {
    slot_expert[i] = params.row.slot_expert[i];
    tokens[i] = params.row.tokens[i];
  }
  if (threadIdx.x / kWarp == 0) {
    find_first_rows(params.counts, shape.num_experts, first_row);
  }
  __syncthreads();
  moe::SourceRow row = params.row;
  row.slot_expert = slot_expert;
  row.tokens = tokens;
  make_parts(BlockTeam{}, row, parts);
  __syncthreads();
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < params.numel; i += step) {
    const int64_t expert = params.expert_of[i];
    const bool exists = expert >= 0 && expert < shape.num_experts;
    const int64_t rank_in_expert = exists ? params.row_map[i] - first_row[expert] : 0;
    params.place_of[i] = place_of_copy(row, parts, expert, rank_in_expert);
  }
}

}  // namespace

void reroute(const RerouteParams& params, cudaStream_t stream) {
  const PlanShape& shape = params.row.shape;
  MC_REQUIRE(shape.num_ranks >= 1 && shape.num_experts >= shape.num_ranks &&
                 shape.num_experts % shape.num_ranks == 0 && shape.num_spare_slots >= 0,
             "{} experts do not divide over {} ranks", shape.num_experts, shape.num_ranks);
  if (params.numel == 0) {
    return;
  }
  const int64_t words = RerouteParts::words(shape) + 2 * shape.num_slots() + shape.num_experts;
  const int64_t bytes = words * static_cast<int64_t>(sizeof(int64_t));
  MC_REQUIRE(
      bytes <= kMaxSharedBytes,
      "{} experts and {} slots take {} bytes; a block that reroutes has {}: use fewer spare slots",
      shape.num_experts, shape.num_slots(), bytes, kMaxSharedBytes);
  check(cudaFuncSetAttribute(reroute_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "asking for {} bytes of shared memory", bytes);
  launch("reroute", reroute_kernel,
         {.blocks = divided_up(params.numel, kThreads * kCopiesPerThread),
          .threads = kThreads,
          .shared_bytes = bytes},
         stream, params);
}

}  // namespace megacore::cuda
