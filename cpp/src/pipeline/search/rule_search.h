// Search for a periodic rule: when each action of a microbatch is due, microbatch after microbatch.
// Private.
//
// A rule gives every F and B or I of microbatch 0 a time, and those of microbatch j the same time
// plus j periods. The list scheduler that follows it makes a start, a steady state and an end, for
// any number of microbatches. So the search works on few of them.

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
