// Is a schedule complete, in range and free of deadlock?

#pragma once

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

}  // namespace megacore::pipeline
