// The CUDA twin of megacore/moe/echo_counts.h: one kernel, which neither allocates nor waits.

#pragma once

#include <cuda_runtime_api.h>

#include "megacore/moe/echo_counts.h"

namespace megacore::cuda {

// Throws std::invalid_argument if the experts do not divide over the ranks.
void count_plan(const moe::PlanShape& shape,
                const moe::EchoReport& report,
                const int64_t* slot_expert,
                const int64_t* copies_of_place,
                int64_t* copies,
                double* sums,
                cudaStream_t stream);

// Adds `bytes` for each of `numel` slots whose expert is in [first, end) to the bytes sent.
void count_held(const int64_t* slot_expert,
                int64_t numel,
                int64_t first,
                int64_t end,
                int64_t bytes,
                double* sums,
                cudaStream_t stream);

}  // namespace megacore::cuda
