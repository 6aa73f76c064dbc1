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

// Some ranks with a value each, in no order; what is asked of them are minima and maxima of keys.
// A plan asks for these more often than for anything else, and with every step fewer ranks are
// left.
class RankValues {
 public:
  explicit RankValues(size_t num_ranks) : place_(num_ranks, kAbsent) { keys_.reserve(num_ranks); }

  bool empty() const { return keys_.empty(); }
  void clear();

  // Adds it, or changes its value.
  void put(int64_t rank, int64_t value) {
    size_t& place = place_[static_cast<size_t>(rank)];
    if (place == kAbsent) {
      place = keys_.size();
      keys_.emplace_back();
    }
    keys_[place] = least_key(value, rank);
  }

  // No-op for a rank that is not here.
  void drop(int64_t rank) {
    size_t& place = place_[static_cast<size_t>(rank)];
    if (place == kAbsent) {
      return;
    }
    const uint64_t last = keys_.back();
    keys_[place] = last;
    place_[static_cast<size_t>(index_of_least(last))] = place;
    keys_.pop_back();
    place = kAbsent;
  }

  // All of these take the lowest rank among equals.
  int64_t most() const;  // REQUIRES: !empty()
  int64_t least_from(
      int64_t least) const;  // least value that is at least this; -1 if there is none

  // f(rank, value) for each
  template <typename F>
  void for_each(const F& f) const {
    for (const uint64_t key : keys_) {
      f(index_of_least(key), static_cast<int64_t>(key >> kIndexBits));
    }
  }

 private:
  static constexpr size_t kAbsent = ~size_t{0};

  std::vector<uint64_t> keys_;  // least_key
  std::vector<size_t> place_;   // (rank,) in keys_
};

// Reused for all runs of a plan, so that a run allocates nothing.
class GreedyRun {
 public:
  // Both arguments must outlive the object.
  GreedyRun(const Loads& loads, const BalancedSpec& spec);

  // Runs `rule` towards `goal`, inside each domain first, then across domains. False as soon as it
  // is sure that a rank ends above `limit`: the run then stops half way.
  // REQUIRES: goal <= limit.
  bool run(Rule rule, int64_t goal, int64_t limit);

  // The outcome of the last run, which must have ended; `least_load` is the load below which less
  // is no better.
  Score score(int64_t least_load) const;
  const std::vector<Clone>& clones() const { return clones_; }  // in the order they were made

 private:
  struct RankRange {
    int64_t begin = 0;
    int64_t end = 0;
  };

  void reset(Rule rule, int64_t goal, int64_t limit);
  void run_within(RankRange range);
  int64_t shortage(int64_t rank) const;
  void enlist(int64_t rank);
  int64_t donor_for(Receiver widest) const;
  Receiver receiver_at(int64_t rank) const;
  int64_t room_to_waste(RankRange range) const;
  void move(int64_t donor, Move wanted);
  int64_t choose_expert(int64_t donor, int64_t wanted) const;

  int64_t surplus(size_t rank) const { return load_[rank] - goal_; }
  bool can_receive(size_t rank) const { return slots_left_[rank] > 0 && load_[rank] < goal_; }
  int64_t most_remaining(int64_t rank) const;

  const Loads& initial_;
  const BalancedSpec& spec_;
  int64_t num_ranks_;
  int64_t experts_per_rank_;
  int64_t largest_expert_;  // its tokens

  Rule rule_ = Rule::kTightFit;
  int64_t goal_ = 0;
  int64_t limit_ = 0;
  int64_t shortage_ = 0;             // of all ranks; above 0 the limit is out of reach
  int64_t spare_room_ = 0;           // see choose_move; Rule::kBudgeted only
  std::vector<int64_t> load_;        // (rank,)
  std::vector<int64_t> slots_left_;  // (rank,)
  std::vector<int64_t> remaining_;   // (expert,) tokens still on the home expert
  std::vector<int64_t> largest_;     // (rank,) the most of `remaining_`; Rule::kBestFill only
  std::vector<int64_t> sends_;       // (rank,) clones made of its experts
  RankValues donors_;                // of the range at work, with their surplus
  RankValues receivers_;             // likewise, with their slack
  std::vector<Clone> clones_;
};

}  // namespace megacore::moe
