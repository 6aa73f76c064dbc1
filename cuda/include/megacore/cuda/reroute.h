// Copies of tokens find the place that computes them: the CUDA twin of megacore/moe/reroute.h.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megacore/moe/reroute.h"

namespace megacore::cuda {

struct RerouteParams {
  const int64_t* expert_of = nullptr;  // (numel) -1 for no copy
  const int64_t* row_map = nullptr;    // (numel) of sort_by_expert
  const int64_t* counts = nullptr;     // (experts) of sort_by_expert
  int64_t numel = 0;
  moe::SourceRow row = {};
  int64_t* place_of = nullptr;  // (numel) written; -1 for no copy
};

// Gives the places of moe::reroute_copies. Neither allocates nor waits. What that one refuses is
// no copy here. Throws std::invalid_argument where the experts and slots are too many for the
// shared memory of a block (512 experts and 64 x 64 slots fit), std::runtime_error if the launch
// fails.
void reroute(const RerouteParams& params, cudaStream_t stream);

}  // namespace megacore::cuda
