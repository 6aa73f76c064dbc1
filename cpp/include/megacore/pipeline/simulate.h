// When would each action run? A schedule, timed with costs per stage.
//
//   const Timeline timeline = simulate(one_f_one_b({.num_ranks = 4, .num_microbatches = 8}), {});
//   timeline.makespan;         // 33: 3 (m + p - 1) with F = I = W = 1
//   timeline.bubble_fraction;  // 3/11

#pragma once

#include <cstdint>
#include <vector>

#include "megacore/pipeline/schedule.h"

namespace megacore::pipeline {

// Times of one stage on one microbatch, in any unit. Each vector has one entry for all stages, or
// one per stage. A fused backward takes backward_input + backward_weight.
struct Costs {
  std::vector<double> forward = {1.0};
  std::vector<double> backward_input = {1.0};
  std::vector<double> backward_weight = {1.0};
  double send = 0.0;  // latency of a message between two ranks; it occupies neither of them
  // Share of the shorter action of a pair that overlaps which the longer one hides, in [0, 1].
  double overlap = 0.0;
};

struct TimedSpan {
  double start;
  double end;
};

struct Timeline {
  double makespan;           // end of the last action
  double bubble_fraction;    // share of num_ranks * makespan in which a rank idles, in [0, 1)
  std::vector<double> busy;  // [num_ranks] time spent in actions
  // [num_ranks] largest number of (stage, microbatch) pairs whose activations are held at once:
  // from F until B, or until W of a split backward. 1 at least in a forward-only schedule.
  std::vector<int64_t> peak_in_flight;
  std::vector<TimedSpan> spans;  // one per entry of schedule.actions
  // [num_ranks] time in which a rank idles only because a message is still under way.
  std::vector<double> exposed = {};
  double send = 0.0;  // latency of a message, of the costs
};

// Every rank runs its actions in order, each as early as its inputs allow. A pair that overlaps
// starts when it has the inputs of both and gives the outputs of both at its end; its spans share
// its time. A fused backward takes `backward`, one entry for all stages or one per stage, as it was
// measured; empty for the sum of its halves. O(actions).
// Throws std::invalid_argument for negative or missing costs, and for a schedule that deadlocks.
// REQUIRES: stages and microbatches of all actions are in range (see validate()).
Timeline simulate(const Schedule& schedule,
                  const Costs& costs,
                  const std::vector<double>& backward = {});

}  // namespace megacore::pipeline
