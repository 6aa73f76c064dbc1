// Named schedules as starting points of the search. Private.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "search/instance.h"

namespace megacore::pipeline {

struct Seed {
  std::string name;
  Orders orders;
  bool same_backward;  // it has the kind of backward of the instance without conversion
  // Makespan of the named schedule itself where it is not that of the orders, which put
  // microbatches in order and take pairs apart; else nullopt.
  std::optional<double> makespan = std::nullopt;
};

// Every named schedule for this placement and number of microbatches, whether or not it fits the
// memory. An instance that splits also takes those with a fused backward, with I and W in place of
// B. With `variants` also other group sizes and warmups.
std::vector<Seed> named_seeds(const Instance& instance, bool variants);

}  // namespace megacore::pipeline
