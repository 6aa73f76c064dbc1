// Rules for the list scheduler. Private.

#pragma once

#include <vector>

#include "bounds/deadline_bound.h"
#include "search/list_scheduler.h"

namespace megacore::pipeline {

// Rules that have proved themselves on different kinds of instances; most useful first.
std::vector<Policy> standard_policies(const Instance& instance);

// Rules like a timed solution, with and without waiting: all actions in the order of their starts.
std::vector<Policy> policies_after(const Orders& orders,
                                   const std::vector<double>& starts,
                                   const Instance& instance);

// The same, but every microbatch like the one in the middle.
std::vector<Policy> periodic_policies_after(const Orders& orders,
                                            const std::vector<double>& starts,
                                            const Instance& instance);

// Rules that run first what must start first to end in time, or what could start first, or between.
std::vector<Policy> policies_within(const StartWindows& windows, const Instance& instance);

}  // namespace megacore::pipeline
