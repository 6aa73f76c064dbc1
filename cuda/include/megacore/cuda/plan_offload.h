// The offload planners on the device: one kernel of one block, from megacore/moe/team_planner.h.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megacore/moe/team_planner.h"

namespace megacore::cuda {

struct PlanOffloadParams {
  moe::PlanShape shape = {};
  moe::PlanSpec spec = {};          // with the spare slots of the shape
  const int64_t* counts = nullptr;  // (num_ranks, num_experts)
  moe::RankPlan plan = {};          // of a rank of the shape; written everywhere
  int64_t* elapsed_ns = nullptr;    // (1) written: how long the block has worked
};

// Shared memory that a plan needs at least.
int64_t plan_offload_bytes(const moe::PlanShape& shape);

// Bit for bit the plan of moe::plan_offload. Bad counts cannot be reported by an exception: the
// summary says so, and the plan has no clones. Neither allocates nor waits.
// Throws std::invalid_argument where an option is out of range or the problem too large for the
// shared memory of one block (64 ranks, 512 experts and 16 slots fit), std::runtime_error if the
// launch fails.
void plan_offload(const PlanOffloadParams& params, cudaStream_t stream);

}  // namespace megacore::cuda
