// The best schedule we can find for a placement, costs and memory, with proof of how good it is.
//
//   const AutoSchedule result = auto_schedule({.placement = Placement::v({.num_ranks = 4}),
//                                              .num_microbatches = 4,
//                                              .memory_limit = {6}});
//   result.certificate.makespan;     // 29, where v_half takes 34
//   result.certificate.bound.value;  // 29: no order of actions is faster
//
// Several methods work on the problem and the fastest schedule wins: every named schedule of the
// same placement that fits (the result is never slower than those), a list scheduler under many
// rules (search/policies.h), a search for rules on a small number of microbatches whose steady
// state is then repeated (rule_search.h), and for small problems a search over all orders
// (exact_search.h).
//
// The result is a pure function of its arguments: effort is counted in actions scheduled, not in
// seconds.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "megacore/pipeline/bounds/lower_bound.h"
#include "megacore/pipeline/schedule.h"

namespace megacore::pipeline {

enum class Effort : uint8_t {
  kFast,      // under a second for 64 ranks and 1024 microbatches on one core
  kThorough,  // up to a few seconds
};

// A named schedule that solves the same problem.
struct NamedResult {
  std::string name;
  double makespan;
};

struct Certificate {
  double makespan = 0.0;
  LowerBound bound = {};    // no order of actions has a smaller makespan
  bool is_optimal = false;  // the makespan is as small as any
  std::string winner = {};  // the method that found the schedule
  // Every named schedule for this placement and kind of backward that fits the memory limit, with
  // its makespan for these costs; the fastest first.
  std::vector<NamedResult> named = {};
  std::vector<int64_t> peak_memory = {};  // [num_ranks] in the unit of the memory limit
  int64_t num_scheduled = 0;              // actions scheduled in all trials

  // By how much an order could be faster at most: makespan / bound - 1.
  double gap() const { return bound.value > 0.0 ? makespan / bound.value - 1.0 : 0.0; }
};

struct AutoSchedule {
  Schedule schedule;  // named "auto", valid
  Certificate certificate;
};

// Throws std::invalid_argument for costs and limits that make no sense, and for a limit that does
// not let a single microbatch pass, with the smallest one that does.
// REQUIRES: the placement has one chain.
AutoSchedule auto_schedule(const BoundProblem& problem, Effort effort);

}  // namespace megacore::pipeline
