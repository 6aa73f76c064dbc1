// Local improvement of a solution: all of it to the right, then all of it to the left. Private.

#pragma once

#include "search/instance.h"
#include "search/order_search.h"

namespace megacore::pipeline {

// Lets every action, the last first, run as late as the others allow, then, the first first, as
// early; gaps close on both ways. Repeats that from starts moved at random and keeps what is not
// slower and fits into memory. Source: justification, Valls, Ballestin and Quintanilla, EJOR 165
// (2005). REQUIRES: `orders` can be run.
FoundOrders justify_orders(OrderTimer& timer,
                           const Instance& instance,
                           Orders orders,
                           const OrderSearch& search);

}  // namespace megacore::pipeline
