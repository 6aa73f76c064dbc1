// What a partial schedule can still reach: when its next actions start at the earliest, and whether
// all that is left can end in time. Private.

#pragma once

#include <cstdint>
#include <vector>

#include "search/beam_state.h"
#include "search/instance.h"

namespace megacore::pipeline {

// Whether the next F of a stage is among those deferred, a bit for each stage.
inline bool is_deferred(uint64_t deferred, int stage) {
  return (deferred >> static_cast<unsigned>(stage) & 1U) != 0;
}

class LayerLimits {
 public:
  // `latest` are the latest starts of a schedule that ends in time.
  LayerLimits(const Instance& instance, const BeamModel& model, const DueTimes& latest);

  // Moves times of the state up to when they matter: a rank is free when it can first run
  // something, and what waits for it comes no earlier. Returns whether all that is left may still
  // end in time. Forwards of stages in `deferred` wait until their ranks have been full. With a
  // parent, only what has changed since is looked at.
  bool tighten(BeamState& state, uint64_t deferred, const BeamState* parent);

  // Whether what waits for its next stage came no later in `one`, give or take `rounding`.
  // REQUIRES: the same actions have run in both.
  bool waits_no_longer(const BeamState& one, const BeamState& other, double rounding) const;

  // Of the stages whose next F is deferred, those for which that is not over: the rank, which has
  // just run something, has room for it.
  uint64_t still_deferred(const BeamState& state, uint64_t deferred, int rank) const;

 private:
  struct Job {
    Token token;
    int microbatch;
    double duration;
    double deadline;  // of its end
  };

  void estimate_forwards(const BeamState& state, uint64_t deferred);
  void estimate_backwards(const BeamState& state);
  void wait_for_room(const BeamState& state);
  bool lift_ranks(BeamState& state) const;
  bool can_become_full(const BeamState& state, uint64_t deferred) const;
  bool starts_in_time(const BeamState& state) const;
  bool lift_waiting(BeamState& state, const Token& token) const;
  bool ends_in_time(const BeamState& state, int rank) const;

  const Instance& instance_;
  const BeamModel& model_;
  const DueTimes& latest_;
  std::vector<double> shortest_;        // [rank] action
  std::vector<std::vector<Job>> jobs_;  // [rank] by deadline
  std::vector<double> forward_;         // [stage] earliest start of the next F, kNever without one
  std::vector<double> backward_;
};

}  // namespace megacore::pipeline
