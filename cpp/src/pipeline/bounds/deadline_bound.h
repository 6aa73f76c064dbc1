// A bound by contradiction: assume an end, and follow what that means for every action. Private.
//
// With an end T every action has a window: it cannot start before its head, nor end later than T
// less its tail. Each window narrows others, through messages, memory and the work of its rank;
// when one is too small for its action, or a rank has more work than its windows have room for, no
// schedule ends by T.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "megacore/pipeline/bounds/lower_bound.h"

namespace megacore::pipeline {

// An end that no schedule beats, found by trying ends between `proved`, which is known to be one,
// and `makespan`, which is not to be exceeded; `proved` if no other is found. Deterministic; stops
// after about `max_steps` narrowed windows, whatever it has proved until then.
// REQUIRES: one chain; require_sound(problem); 0 <= proved <= makespan.
double deadline_bound(const BoundProblem& problem,
                      double proved,
                      double makespan,
                      int64_t max_steps);

// When the k-th F and the k-th B or I of a stage may start in a schedule that ends by a given time:
// [stage * num_microbatches + k].
struct StartWindows {
  std::vector<double> earliest_forward = {};
  std::vector<double> latest_forward = {};
  std::vector<double> earliest_backward = {};
  std::vector<double> latest_backward = {};
};

// Steps that a search spends on windows before it starts.
constexpr int64_t kDeadlineSteps = 200'000;

// As narrow as they get in about `max_steps` steps; empty if no schedule ends by `end`.
// REQUIRES: one chain; require_sound(problem).
std::optional<StartWindows> start_windows(const BoundProblem& problem,
                                          double end,
                                          int64_t max_steps);

}  // namespace megacore::pipeline
