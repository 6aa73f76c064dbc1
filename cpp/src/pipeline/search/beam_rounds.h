// Beam searches that build on each other. Private.
//
// Idea. A beam (beam.h) needs to know when each action is due. Three guesses, each better than the
// one before:
//
//   deadlines   the latest starts for an end at 1.005 times the lower bound
//   half        a schedule of m / 2 microbatches, found in the same way, whose middle is drawn out:
//               of m' = m / 2, action k of a stage is due, with x = clamp(k - m'/2, 0, m - m'), at
//                 due'(k - x) + 1.03 (bound(m) - bound(m')) x / (m - m')
//   best        the starts of the best schedule so far, as long as the beam improves on it
//
// No pattern has to repeat, which a rule (rule_search.h) needs: loops with messages and the memory
// of 1F1B have no steady state without gaps, and this finds the shortest schedules known for them.

#pragma once

#include <cstdint>
#include <vector>

#include "megacore/pipeline/bounds/lower_bound.h"
#include "search/beam.h"

namespace megacore::pipeline {

struct FoundOrders {
  Orders orders = {};
  double makespan = kNever;
};

// The starts of a timed solution.
DueTimes due_times_of(const Orders& orders,
                      const std::vector<double>& starts,
                      const Instance& instance);

// Of a schedule for fewer microbatches, which then ends `longer` later: its first half as it is,
// its last half later by that, and the microbatches between evenly spread.
// REQUIRES: `more` is `few` with more microbatches.
DueTimes drawn_out(const DueTimes& due, const Instance& few, const Instance& more, double longer);

class BeamRounds {
 public:
  // `bound` is a lower bound of the problem, `known` the fastest orders, if any are.
  // REQUIRES: `instance` is that of `problem`; both outlive this.
  BeamRounds(const BoundProblem& problem,
             const Instance& instance,
             double bound,
             FoundOrders known);

  // All that the beams find, in that order; stops when some orders reach the bound. To call once.
  std::vector<FoundOrders> run();

  // Actions that the beams have scheduled.
  int64_t num_scheduled() const { return num_scheduled_; }

 private:
  bool is_optimal() const { return best_.makespan <= bound_ + kSameTime; }
  bool is_far() const;
  void follow_deadlines();
  void follow_half(int few);
  void follow_best();
  void add(const DueTimes& due, double pull);

  const BoundProblem& problem_;
  const Instance& instance_;
  double bound_;
  FoundOrders known_;
  FoundOrders best_;  // of those that the next beams follow
  OrderTimer timer_;
  std::vector<FoundOrders> found_;
  int64_t num_scheduled_ = 0;
};

}  // namespace megacore::pipeline
