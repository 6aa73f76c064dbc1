#include "megacore/pipeline/simulate.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "dependencies.h"
#include "megacore/base/check.h"

namespace megacore::pipeline {
namespace {

std::vector<double> per_stage(const std::vector<double>& costs, int num_stages, const char* name) {
  const auto n = static_cast<size_t>(num_stages);
  MC_REQUIRE(costs.size() == 1 || costs.size() == n,
             "cost '",
             name,
             "' has ",
             costs.size(),
             " entries; give one for all stages or ",
             num_stages,
             ", one per stage");
  for (const double cost : costs) {
    MC_REQUIRE(std::isfinite(cost) && cost >= 0.0,
               "cost '",
               name,
               "' is ",
               cost,
               "; it must be a finite number of at least 0");
  }
  return costs.size() == n ? costs : std::vector<double>(n, costs.front());
}

// Duration of the compute kinds by stage.
class Durations {
 public:
  Durations(const Costs& costs, int num_stages)
      : table_{per_stage(costs.forward, num_stages, "forward"),
               {},
               per_stage(costs.backward_input, num_stages, "backward_input"),
               per_stage(costs.backward_weight, num_stages, "backward_weight")} {
    table_[1].resize(table_[2].size());
    std::transform(
        table_[2].begin(), table_[2].end(), table_[3].begin(), table_[1].begin(), std::plus<>());
  }

  double of(const Action& action) const {
    return table_[static_cast<size_t>(action.kind)][static_cast<size_t>(action.stage)];
  }

 private:
  std::array<std::vector<double>, 4> table_;  // by kind: F, B, I, W
};

int64_t peak_in_flight(std::span<const Action> actions, bool forward_only) {
  int64_t held = 0;
  int64_t peak = 0;
  for (const Action& action : actions) {
    if (action.kind == ActionKind::kForward) peak = std::max(peak, ++held);
    if (frees_activation(action.kind) || forward_only) --held;
  }
  return peak;
}

}  // namespace

Timeline simulate(const Schedule& schedule, const Costs& costs) {
  const Durations durations(costs, schedule.num_stages());
  MC_REQUIRE(std::isfinite(costs.send) && costs.send >= 0.0,
             "cost 'send' is ",
             costs.send,
             "; it must be a finite number of at least 0");
  const Placement& placement = schedule.placement;
  const auto num_ranks = static_cast<size_t>(schedule.num_ranks());
  const ValueIndex index(schedule.num_stages(), schedule.num_microbatches);
  std::vector<double> value_time(index.size(), 0.0);
  std::vector<double> rank_time(num_ranks, 0.0);
  Timeline timeline{.makespan = 0.0,
                    .bubble_fraction = 0.0,
                    .busy = std::vector<double>(num_ranks, 0.0),
                    .peak_in_flight = {},
                    .spans = std::vector<TimedSpan>(schedule.actions.size())};

  const auto num_run = run_in_order(
      schedule, [&](int64_t position, const Action& action, const Dependencies& dependencies) {
        const int rank = placement.rank_of(action.stage);
        double& now = rank_time[static_cast<size_t>(rank)];
        double start = now;
        for (const Action& dependency : dependencies) {
          const bool remote = placement.rank_of(dependency.stage) != rank;
          start = std::max(start, value_time[index.of(dependency)] + (remote ? costs.send : 0.0));
        }
        const double duration = durations.of(action);
        now = start + duration;
        value_time[index.of(action)] = now;
        timeline.busy[static_cast<size_t>(rank)] += duration;
        timeline.spans[static_cast<size_t>(position)] = {start, now};
      });
  if (!is_complete(schedule, num_run)) {
    throw std::invalid_argument(deadlock_report(schedule, num_run));
  }

  double busy = 0.0;
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    timeline.makespan = std::max(timeline.makespan, rank_time[rank]);
    busy += timeline.busy[rank];
    timeline.peak_in_flight.push_back(
        peak_in_flight(schedule.rank_actions(static_cast<int>(rank)), schedule.forward_only));
  }
  const double available = timeline.makespan * static_cast<double>(num_ranks);
  if (available > 0.0) timeline.bubble_fraction = 1.0 - busy / available;
  return timeline;
}

}  // namespace megacore::pipeline
