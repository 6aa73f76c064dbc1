// Local improvement of a solution: moves on its critical path. Private.

#pragma once

#include <cstdint>

#include "search/instance.h"

namespace megacore::pipeline {

struct OrderSearch {
  double target;        // a makespan at which to stop
  int64_t max_actions;  // to time
  uint64_t seed;
};

struct FoundOrders {
  Orders orders;
  double makespan;
  int64_t num_scheduled;
};

// Moves an action of the critical path to another place of its rank and keeps what is not slower,
// as long as memory allows. Source: critical blocks, Nowicki and Smutnicki, Management Science 42
// (1996); places are chosen at random.
FoundOrders search_orders(OrderTimer& timer,
                          const Instance& instance,
                          Orders orders,
                          const OrderSearch& search);

}  // namespace megacore::pipeline
