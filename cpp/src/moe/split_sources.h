// The part of a plan that the CPU computes by itself: the tokens of each source rank for each
// clone.

#pragma once

#include <cstdint>

#include "megacore/moe/team_planner.h"

namespace megacore::moe {

// Writes the tokens of all sources for all clones (`rerouted` of a TeamPlan, all of it), the
// numbers that TeamPlanner computes from the same clones. It walks through counts and results
// source by source, as they lie in memory; the team has a warp for each expert, which a GPU does
// better.
void split_sources(const PlanShape& shape,
                   bool is_balanced,
                   const int64_t* counts,   // (rank, expert)
                   const int64_t* experts,  // (expert,) tokens from all ranks
                   const SlotTable& chosen,
                   int64_t* rerouted);

}  // namespace megacore::moe
