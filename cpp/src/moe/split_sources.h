// The part of a plan that the CPU computes by itself: the tokens of each source rank for each
// clone.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "megacore/moe/team_planner.h"

namespace megacore::moe {

// Tokens of all sources for all clones in use.
struct SourceTokens {
  std::vector<int64_t> slot;          // (clone,) ascending, rank * slots + slot
  std::vector<int32_t> expert;        // (clone,)
  std::unique_ptr<int32_t[]> tokens;  // (source rank, clone)

  size_t num_clones() const { return slot.size(); }
  const int32_t* of_source(int64_t source) const {
    return tokens.get() + static_cast<size_t>(source) * num_clones();
  }
};

// Computes the numbers that TeamPlanner computes from the same clones. It walks through counts and
// results source by source, as they lie in memory; the team has a warp for each expert, which a GPU
// does better.
SourceTokens split_sources(const PlanShape& shape,
                           bool is_balanced,
                           const int64_t* counts,   // (rank, expert)
                           const int64_t* experts,  // (expert,) tokens from all ranks
                           const SlotTable& chosen);

}  // namespace megacore::moe
