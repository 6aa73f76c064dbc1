// The balanced offload planner: every rank ends at or below a goal load whenever slots allow it.
//
// The goal is the average plus a tolerance. A step moves tokens of one expert of a rank above the
// goal (donor) to a rank below it with a free slot (receiver). Unlike the documented planner, a
// donor may give more than its surplus and take tokens of another rank later, so that a slot need
// not stay half used. Four rules for picking donor, receiver and amount are each run to the end;
// the best outcome wins. Where none reached the goal, which needs few slots and very uneven loads,
// further goals between it and the best load are tried.
//
// Two facts make the steps simple. A donor has received nothing before: receivers stop at the goal.
// And after a step the expert, the receiver or the donor is exhausted, so no rank ever holds two
// copies of one expert.
//
// Bound. With at least as many slots as experts per rank, the goal is always reached: under
// Rule::kWholeRank the fullest rank h fills the emptiest rank u alone. h holds only tokens of its
// own, and more than the goal, so it cannot run dry; at most experts_per_rank of its experts land
// on u, whose slots were all free; u ends exactly at the goal. Each such fill leaves one rank less
// below the goal, and while a rank is above the goal one is below it.

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
  // Ranks [0, n), [n, 2n) ... are connected best; clones stay inside such a domain where the goal
  // can be reached so, and leave it only for the rest. Must divide the number of ranks.
  int64_t domain_size = 1;
};

struct BalancedClones {
  std::vector<Clone> clones;  // by (rank, slot)
  int64_t goal = 0;           // the load aimed at
  int64_t max_load = 0;       // the load reached
  Rule rule = Rule::kTightFit;
  int64_t num_runs = 0;  // greedy runs begun: kNumRules where the first goal was reached
};

// O(runs * slots * (ranks + experts per rank)), runs is 4 where the goal is reached at once and at
// most 100. Deterministic: integers only, ties go to the lowest index.
// Throws std::logic_error should the bound above ever be broken.
BalancedClones plan_balanced(const Loads& loads, const BalancedSpec& spec);

}  // namespace megacore::moe
