// Costs per stage, checked. Private.

#pragma once

#include <vector>

#include "megacore/pipeline/simulate.h"

namespace megacore::pipeline {

// Each vector has one entry per stage.
struct StageCosts {
  std::vector<double> forward;
  std::vector<double> input;
  std::vector<double> weight;
  std::vector<double> backward;  // input + weight
  double send;
};

// Throws std::invalid_argument for costs that are negative, not finite, or too few.
StageCosts stage_costs(const Costs& costs, int num_stages);

}  // namespace megacore::pipeline
