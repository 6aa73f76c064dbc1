// What makes a timed schedule as long as it is.

#pragma once

#include <cstdint>
#include <vector>

#include "megacore/pipeline/schedule.h"
#include "megacore/pipeline/simulate.h"

namespace megacore::pipeline {

// A chain of actions that determines the makespan, as indices into schedule.actions, in time: each
// starts when the one before it ends, or when the message of that arrives. O(actions).
// REQUIRES: `timeline` is that of `schedule`.
std::vector<int64_t> critical_path(const Schedule& schedule, const Timeline& timeline);

}  // namespace megacore::pipeline
