// Plan of clones: hot experts in spare slots, and their tokens. Computed by team_planner.h.
//
// Every rank computes the same plan from the same counts: integers only, ties go to the lowest
// index.
// A plan moves tokens from home experts and conserves their number:
//
//   tokens of e that source r keeps at home = counts[r, e] - sum over slots (p, s) that hold e
//                                                            of rerouted[r, p, s]

#pragma once

#include <cstdint>
#include <vector>

#include "megacore/moe/plan_spec.h"
#include "megacore/moe/token_counts.h"

namespace megacore::moe {

struct OffloadPlan {
  int64_t num_ranks = 0;
  int64_t num_experts = 0;
  int64_t num_spare_slots = 0;
  std::vector<int64_t> slot_expert = {};  // (rank, slot): cloned expert, -1 where unused
  std::vector<int64_t> rerouted = {};     // (source rank, destination rank, slot): tokens
  std::vector<int64_t> load_before = {};  // (rank,)
  std::vector<int64_t> load_after = {};   // (rank,)
  int64_t max_load = 0;                   // highest of load_after
  int64_t num_clones = 0;
  // Rows of a static receive buffer that are sufficient for this total. Balanced: the goal load, or
  // the load below which there is no plan if that is larger; echo: the floor average plus the
  // remainder.
  int64_t bound = 0;
  bool bound_holds = true;  // max_load <= bound; always, if balanced and slots >= experts per rank

  friend bool operator==(const OffloadPlan&, const OffloadPlan&) = default;
};

// Throws std::invalid_argument for bad counts (see sum_loads) and bad options (see require_spec),
// std::logic_error if the bound of the balanced planner is violated.
OffloadPlan plan_offload(const TokenCounts& counts, const PlanSpec& spec);
// The part of the same plan that `plan.rank` needs; all arrays of `plan` are written.
// REQUIRES: plan.rank is a rank of the counts.
void plan_offload_of_rank(const TokenCounts& counts, const PlanSpec& spec, const RankPlan& plan);

}  // namespace megacore::moe
