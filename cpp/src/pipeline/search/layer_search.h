// An exact search of all orders with a fused backward, one action after another. Private.
//
// Idea. Layer n has all partial schedules of n actions that can end by `end`: those of which every
// action to come can start by its latest start for that end. With the same actions done, one that
// has no rank and no value later than another dominates it, so few are left per layer. An empty
// layer proves that no schedule ends by `end`: a bound that the others miss, since it sees the
// latency that loops with messages lose.

#pragma once

#include <cstdint>
#include <optional>

#include "search/instance.h"

namespace megacore::pipeline {

struct LayerSearch {
  double end;          // only schedules that end by then count
  int64_t max_states;  // partial schedules to look at, in all
  size_t max_width;    // of those with equally many actions
};

struct LayerResult {
  bool is_complete = false;           // no order was left out that ends by then
  std::optional<Orders> orders = {};  // the fastest, if any ends by then
  int64_t num_states = 0;
};

// Whether the search applies: a fused backward, every action takes some time, at most 64 stages.
bool can_search_layers(const Instance& instance);

// Breadth first: all partial schedules of one action, then of two, and so on. Each goes on in every
// way in which no rank leaves a gap that its next action could fill (where memory is short a rank
// may also leave room for a later forward), and one is dropped when an action of it is too late
// for the end, or when another one with the same actions done is nowhere later. So what is left at
// the end holds a fastest schedule, and when nothing is left no schedule ends in time.
// Source: active schedules, Giffler and Thompson, Operations Research 8 (1960); dominance between
// partial schedules in dynamic programming, Held and Karp, J. SIAM 10 (1962).
// REQUIRES: can_search_layers(instance); `instance` is that of `problem`.
LayerResult search_layers(const BoundProblem& problem,
                          const Instance& instance,
                          const LayerSearch& search);

}  // namespace megacore::pipeline
