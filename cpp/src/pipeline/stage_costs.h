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
  std::vector<double> backward;
  double send;
};

// A fused backward takes `backward`, one entry for all stages or one per stage; empty for the sum
// of both halves. Throws std::invalid_argument for costs that are negative, not finite, or too few.
StageCosts stage_costs(const Costs& costs,
                       int num_stages,
                       const std::vector<double>& backward = {});

}  // namespace megacore::pipeline
