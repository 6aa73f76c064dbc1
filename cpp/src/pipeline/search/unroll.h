// A solution for few microbatches, stretched to more by repeating its steady state. Private.

#pragma once

#include <optional>

#include "search/instance.h"

namespace megacore::pipeline {

// Finds, around the middle of a timed solution, a kernel: the same number of microbatches through
// every stage on every rank, from one moment on. The start stays, the kernel is repeated, the end
// stays. Returns the fastest result over several kernels, or nullopt when there is none.
// REQUIRES: `more` is `few` with more microbatches; `starts` are those of `orders`.
std::optional<Orders> unroll(const Orders& orders,
                             const std::vector<double>& starts,
                             const Instance& few,
                             const Instance& more);

}  // namespace megacore::pipeline
