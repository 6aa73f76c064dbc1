// Branch and bound over all orders of a small instance. Private.
//
// Idea. A partial solution S is a set of actions done and, per rank, the time it is free. It can
// end no earlier than, over ranks, the earliest start of what the rank has left, plus the work
// left, plus the shortest way from its last action to the end. S dominates S' with the same actions
// done if no rank and no value that is still needed is later in S.

#pragma once

#include <cstdint>
#include <optional>

#include "search/instance.h"

namespace megacore::pipeline {

struct ExactSearch {
  double below;       // only solutions with a smaller makespan count
  double target;      // a makespan at which to stop
  int64_t max_nodes;  // partial solutions to look at
};

struct ExactResult {
  std::optional<Orders> orders;  // the fastest found, if any is below
  double makespan;               // of orders, else `below`
  bool is_complete;              // no order has a smaller makespan
  int64_t num_nodes;
};

// Whether the search applies: every action takes some time.
bool can_search_exactly(const Instance& instance);

// Depth first, the most promising action first. A partial solution is dropped when a bound on what
// is left reaches the best makespan, or when another one with the same actions done was nowhere
// later. REQUIRES: can_search_exactly(instance).
ExactResult search_exactly(const Instance& instance, const ExactSearch& search);

}  // namespace megacore::pipeline
