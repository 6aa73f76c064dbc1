// How fast can any schedule be? Bounds that no order of actions beats.
//
//   const LowerBound bound = lower_bound({.placement = Placement::v({.num_ranks = 4}),
//                                         .num_microbatches = 16,
//                                         .memory_limit = {8}});
//   bound.value;   // 99: zb_v reaches it
//   bound.reason;  // BoundReason::kRankWork
//
// Symbols: M activations that a rank may hold; head of an action: time before which it cannot
// start; tail: time that must pass after it.

#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "megacore/pipeline/placement.h"
#include "megacore/pipeline/schedule.h"
#include "megacore/pipeline/simulate.h"

namespace megacore::pipeline {

struct BoundProblem {
  Placement placement;
  int num_microbatches;  // >= 1
  Costs costs = {};      // overlap must be 0
  // Whether W may run apart from I. A fused backward takes I + W and gives its gradient at its end.
  bool split_backward = true;
  // Activations, counted in (stage, microbatch) pairs from F until B or W, that a rank may hold:
  // one number for all ranks or one per rank, each >= 1; empty for no limit.
  std::vector<int64_t> memory_limit = {};
  // Size of one activation of each stage in the unit of memory_limit: one number for all stages or
  // one per stage, each >= 1; empty for 1.
  std::vector<int64_t> activation_size = {};
};

enum class BoundReason : uint8_t {
  kCriticalPath,  // one microbatch through all stages and back
  kRankWork,      // a rank: earliest head, all its work, shortest tail
  kRankQueue,   // a rank serves its actions in the order of their heads; the k-th F also waits for
                // the (k - M)-th release of memory
  kMemoryArea,  // a rank: lifetimes of all activations fit into M times the makespan, less what
                // the ramps at the start and the end leave unused
  kDelivery,    // the queue with heads and tails, both with memory (Jackson's preemptive schedule)
  kDeadlines,   // with an earlier end some action has no time left; of tightened() only
  kExhaustion,  // a search left no order out; of auto_schedule() only
};
inline constexpr size_t kNumBoundReasons = 7;

// The name as one would write it, rank_work, and what it means, for people.
std::string_view name_of(BoundReason reason);
std::string_view to_text(BoundReason reason);

struct LowerBound {
  double value = 0.0;
  BoundReason reason = BoundReason::kCriticalPath;      // the first that reaches the value
  std::array<double, kNumBoundReasons> by_reason = {};  // the best of each over all ranks, or 0
};

// Throws std::invalid_argument for numbers that make no sense, but for limits that are too small.
void require_sound(const BoundProblem& problem);

// O(p (v m log(v m) + v p)) for p ranks, v stages per rank, m microbatches.
// Throws std::invalid_argument for costs and limits that make no sense.
// Source: Carlier, The one-machine sequencing problem, EJOR 11 (1982), for the last; the heads and
// tails with memory are our own.
LowerBound lower_bound(const BoundProblem& problem);

// The bound, raised as far as deadlines prove it, towards the makespan of a schedule for the
// problem. For one chain; the bound itself for more. Deterministic: stops after a fixed number of
// steps.
LowerBound tightened(LowerBound bound, const BoundProblem& problem, double makespan);

// What a schedule solves: its placement and microbatches, a backward that is split if it has a W,
// and as memory limits what its ranks hold. REQUIRES: validate(schedule) passes; it trains.
BoundProblem problem_of(const Schedule& schedule, const Costs& costs);

}  // namespace megacore::pipeline
