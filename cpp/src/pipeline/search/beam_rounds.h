// Beam searches that build on each other. Private.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <vector>

#include "megacore/pipeline/bounds/lower_bound.h"
#include "search/beam.h"
#include "search/order_search.h"

namespace megacore::pipeline {

// Beams guided by the deadlines for an end near a bound, then by the best of all orders known, as
// long as that helps; where these stay far above the bound, by a schedule for half as many
// microbatches, found in the same way, whose middle is drawn out, and on from that; in a small
// problem also on from deadlines for other ends. With a fused backward also from the end of time.
class BeamRounds {
 public:
  // `bound` is a lower bound of the problem, `known` the fastest orders: without tokens and with
  // the makespan kNever if none are.
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
  void run_few();
  void run_more();
  void start_at(double longer, std::optional<double> pull, std::optional<double> pull_from_end);
  void add_drawn_out(int few);
  void follow_best(std::initializer_list<double> pulls);
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
