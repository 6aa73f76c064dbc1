// Beam searches that build on each other. Private.

#pragma once

#include <cstdint>
#include <vector>

#include "auto_beam.h"
#include "auto_order_search.h"
#include "megacore/pipeline/lower_bound.h"

namespace megacore::pipeline {

// Beams guided by the deadlines for an end near a bound; where the best stays far above it, by a
// schedule for half as many microbatches, found in the same way, whose middle is drawn out; then by
// the best of all, as long as that helps. With a fused backward each also from the end of time.
class BeamRounds {
 public:
  // `bound` is a lower bound of the problem, `best` the fastest orders known: without tokens and
  // with the makespan kNever if none are.
  // REQUIRES: `instance` is that of `problem`; both outlive this.
  BeamRounds(const BoundProblem& problem, const Instance& instance, double bound, FoundOrders best);

  // All that the beams find, in that order; stops when some orders reach the bound. To call once.
  std::vector<FoundOrders> run();

  // Actions that the beams have scheduled.
  int64_t num_scheduled() const { return num_scheduled_; }

 private:
  bool is_optimal() const { return best_.makespan <= bound_ + kSameTime; }
  void add_within_deadlines();
  void add_drawn_out();
  void follow_best();
  void add(const DueTimes& due, double pull);
  void add_from_end(const DueTimes& due, double end, double pull);
  void offer(Orders orders);
  BeamSearch beam(double pull) const;

  const BoundProblem& problem_;
  const Instance& instance_;
  double bound_;
  FoundOrders known_;
  FoundOrders best_;
  OrderTimer timer_;
  std::vector<FoundOrders> found_;
  int64_t num_scheduled_ = 0;
};

}  // namespace megacore::pipeline
