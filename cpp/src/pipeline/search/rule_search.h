// Search for a periodic rule: when each action of a microbatch is due, microbatch after microbatch.
// Private.
//
// Idea. A rule gives every F and B or I of microbatch 0 a time t, and those of microbatch j the
// time t + j T (policies.h). The list scheduler that follows it makes a start, a steady state and
// an end, for any number of microbatches; so the search works on 2p + m mod p of them (m, if below
// 3p), and unroll.h repeats their steady state. One step changes t of one stage or of all later
// ones by {1/4 .. 4} mean durations, T by a factor in {0.8, 0.95, 1.05, 1.25}, the cap of a stage
// by one, how long a rank waits, or how many W may wait; it is kept if the schedule is not slower.
// Vs in little memory need it: the standard rules stay 3 to 5% above it there.

#pragma once

#include <cstdint>

#include "search/list_scheduler.h"

namespace megacore::pipeline {

struct RuleSearch {
  double target;        // a makespan at which to stop
  int64_t max_actions;  // to schedule
  uint64_t seed;
};

struct FoundRule {
  Policy policy;
  double makespan;
  int64_t num_scheduled;
};

// Changes one thing at a time and keeps what is not slower. REQUIRES: policy has keys for
// microbatch 0 only.
FoundRule search_rule(ListScheduler& scheduler,
                      const Instance& instance,
                      Policy policy,
                      const RuleSearch& search);

}  // namespace megacore::pipeline
