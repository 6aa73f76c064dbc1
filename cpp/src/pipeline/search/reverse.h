// Due times for a beam search, and a problem with a fused backward seen from its end. Private.

#pragma once

#include <vector>

#include "search/beam.h"
#include "search/instance.h"

namespace megacore::pipeline {

// The starts of timed orders.
DueTimes due_times_of(const Orders& orders,
                      const std::vector<double>& starts,
                      const Instance& instance);

// Of a schedule for fewer microbatches, which then ends `longer` later: its first half as it is,
// its last half later by that, and the microbatches between evenly spread.
// REQUIRES: `more` is `few` with more microbatches.
DueTimes drawn_out(const DueTimes& due, const Instance& few, const Instance& more, double longer);

// The same problem with time running backwards: what was F is B, and B is F. It needs as much
// memory: an activation lives as long. REQUIRES: !instance.split.
Instance reversed(const Instance& instance);
// A solution of the one problem is one of the other.
Orders reversed(const Orders& orders);
// Of a schedule that ends at `end`; for reversed(instance).
DueTimes reversed(const DueTimes& due, const Instance& instance, double end);

}  // namespace megacore::pipeline
