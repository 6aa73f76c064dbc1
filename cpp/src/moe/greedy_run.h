// One greedy run of the balanced planner: one rule, one goal, from the initial loads to the end.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "megacore/moe/balanced.h"
#include "megacore/moe/clone.h"
#include "megacore/moe/planner_math.h"
#include "megacore/moe/token_counts.h"

namespace megacore::moe {

// Reused for all runs of a plan, so that a run allocates nothing.
class GreedyRun {
 public:
  // Both arguments must outlive the object.
  GreedyRun(const Loads& loads, const BalancedSpec& spec);

  // Runs `rule` towards `goal`, inside each domain first, then across domains.
  void run(Rule rule, int64_t goal);

  // The last run's outcome; `least_load` is the load below which less is no better.
  Score score(int64_t least_load) const;
  const std::vector<Clone>& clones() const { return clones_; }  // in the order they were made

 private:
  struct RankRange {
    int64_t begin = 0;
    int64_t end = 0;
  };

  void reset(Rule rule, int64_t goal);
  void run_within(RankRange range);
  int64_t donor_for(Receiver widest, RankRange range) const;
  Receiver widest_slack(RankRange range) const;
  Receiver tightest_slack(int64_t surplus, RankRange range) const;
  int64_t room_to_waste(RankRange range) const;
  void move(int64_t donor, Move wanted);
  int64_t choose_expert(int64_t donor, int64_t wanted) const;

  int64_t surplus(size_t rank) const { return load_[rank] - goal_; }
  bool can_receive(size_t rank) const { return slots_left_[rank] > 0 && load_[rank] < goal_; }

  const Loads& initial_;
  const BalancedSpec& spec_;
  int64_t num_ranks_;
  int64_t experts_per_rank_;

  Rule rule_ = Rule::kTightFit;
  int64_t goal_ = 0;
  int64_t spare_room_ = 0;           // see choose_move; Rule::kBudgeted only
  std::vector<int64_t> load_;        // (rank,)
  std::vector<int64_t> slots_left_;  // (rank,)
  std::vector<int64_t> remaining_;   // (expert,) tokens still on the home expert
  std::vector<int64_t> largest_;     // (rank,) the most of `remaining_`; Rule::kBestFill only
  std::vector<int64_t> sends_;       // (rank,) clones made of its experts
  std::vector<Clone> clones_;
};

}  // namespace megacore::moe
