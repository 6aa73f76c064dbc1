#include "stage_costs.h"

#include <algorithm>
#include <cmath>

#include "megacore/base/check.h"

namespace megacore::pipeline {
namespace {

std::vector<double> per_stage(const std::vector<double>& costs, int num_stages, const char* name) {
  const auto n = static_cast<size_t>(num_stages);
  MC_REQUIRE(costs.size() == 1 || costs.size() == n,
             "cost '{}' has {} entries; give one for all stages or {}, one per stage", name,
             costs.size(), num_stages);
  for (const double cost : costs) {
    MC_REQUIRE(std::isfinite(cost) && cost >= 0.0,
               "cost '{}' must be a finite number of at least 0, got {}", name, cost);
  }
  return costs.size() == n ? costs : std::vector<double>(n, costs.front());
}

}  // namespace

StageCosts stage_costs(const Costs& costs, int num_stages, const std::vector<double>& backward) {
  StageCosts result{.forward = per_stage(costs.forward, num_stages, "forward"),
                    .input = per_stage(costs.backward_input, num_stages, "backward_input"),
                    .weight = per_stage(costs.backward_weight, num_stages, "backward_weight"),
                    .backward = {},
                    .send = costs.send};
  MC_REQUIRE(std::isfinite(costs.send) && costs.send >= 0.0,
             "cost 'send' must be a finite number of at least 0, got {}", costs.send);
  if (!backward.empty()) {
    result.backward = per_stage(backward, num_stages, "backward");
    return result;
  }
  for (size_t stage = 0; stage < result.input.size(); ++stage) {
    result.backward.push_back(result.input[stage] + result.weight[stage]);
  }
  return result;
}

}  // namespace megacore::pipeline
