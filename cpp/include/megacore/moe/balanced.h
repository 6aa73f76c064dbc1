// Balanced offload planner: the load of every rank is at most a goal, whenever slots allow it.
//
// The goal is the average plus a tolerance. A step moves tokens of one expert from a rank above the
// goal (donor) to a rank below it with a free slot (receiver). Unlike in the documented planner, a
// donor may give more than its surplus and take tokens of another rank later, so that slots are
// fully used. Four rules for the choice of donor, receiver and amount run to completion; the best
// result is used. If none reached the goal, which happens with few slots and very uneven loads,
// further goals between it and the best load are tried.
//
// Two invariants simplify the steps. A donor has received nothing before: receivers stop at the
// goal.
// And after a step the expert, the receiver or the donor is exhausted, so no rank ever holds two
// copies of one expert.
//
// Bound. With at least as many slots as experts per rank, the goal is always reached: under
// Rule::kWholeRank the most loaded rank h fills the least loaded rank u alone. h has only its own
// tokens, and more than the goal, so they suffice; at most experts_per_rank of its experts are
// cloned to u, whose slots were all free; u ends exactly at the goal. Each such fill reduces the
// number of ranks below the goal by one, and while a rank is above the goal one is below it.

#pragma once

#include <cstdint>
#include <vector>

#include "megacore/moe/clone.h"
#include "megacore/moe/planner_math.h"
#include "megacore/moe/token_counts.h"

namespace megacore::moe {

struct BalancedSpec {
  int64_t num_spare_slots = 1;
  // Room above the average that is not worth a clone, in millionths of it.
  int64_t tolerance_per_million = 10'000;
  // Ranks [0, n), [n, 2n) ... have the fastest links; clones stay inside such a domain if the goal
  // can be reached that way, and leave it only for the rest. Must divide the number of ranks.
  int64_t domain_size = 1;
};

struct BalancedClones {
  std::vector<Clone> clones;  // by (rank, slot)
  int64_t goal = 0;           // the load aimed at
  int64_t max_load = 0;       // the load reached
  Rule rule = Rule::kTightFit;
  int64_t num_runs = 0;  // greedy runs begun: kNumRules where the first goal was reached
};

// O(runs * slots * (ranks + experts per rank)); runs is 4 if the goal is reached at once and at
// most 100. Deterministic: integers only, ties go to the lowest index.
// Throws std::logic_error if the bound above is violated.
BalancedClones plan_balanced(const Loads& loads, const BalancedSpec& spec);

}  // namespace megacore::moe
