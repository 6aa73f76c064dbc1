// When a forward may start, so that no schedule built action by action deadlocks. Private.

#pragma once

#include <cstdint>
#include <vector>

#include "search/instance.h"

namespace megacore::pipeline {

// Whether the next F of a stage fits the memory of its rank, and leaves room there for every
// microbatch that is not yet forward through the stages of the rank, after all older ones have
// gone: then every microbatch that has started can still end. `counts` [stage * 3 + part] says how
// many actions have run, `held` what the rank holds. As microbatches keep their order on every
// stage, no valid order ever breaks this rule.
bool leaves_room(const Instance& instance, const std::vector<int>& counts, int64_t held, int stage);

}  // namespace megacore::pipeline
