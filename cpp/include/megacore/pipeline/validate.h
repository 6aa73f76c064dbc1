// Is a schedule complete, in range and free of deadlock?

#pragma once

#include <cstdint>
#include <span>

#include "megacore/pipeline/schedule.h"

namespace megacore::pipeline {

// Checks that
//   - stages, microbatches and kinds are in range, and each action stands on the rank of its stage;
//   - every stage runs forward exactly once and backward exactly once (one B, or one I and one W)
//     on every microbatch of its chain, or no backward at all when the schedule is forward-only;
//   - every overlap is a forward and the backward right after it;
//   - every rank can run its actions in its order: no action waits, over any chain of ranks, for
//     itself.
// Throws std::invalid_argument otherwise. The message lists what is wrong, says where every stuck
// rank waits and for what, and shows the schedule as a table with those places marked. O(actions).
void validate(const Schedule& schedule);

// Checks that no rank holds more (stage, microbatch) activations at once than its limit; one limit
// for all ranks, or one per rank. Throws std::invalid_argument that names the rank, the forward
// that exceeds its limit, and its peak. O(actions). REQUIRES: validate(schedule) passes.
void validate_memory(const Schedule& schedule, std::span<const int64_t> limits);

}  // namespace megacore::pipeline
