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
  MC_REQUIRE(costs.overlap >= 0.0 && costs.overlap <= 1.0,
             "cost 'overlap' is ",
             costs.overlap,
             "; it is the share that is hidden, from 0 to 1");
  const Placement& placement = schedule.placement;
  const std::vector<uint8_t> starts_pair = pair_starts(schedule);
  const auto num_ranks = static_cast<size_t>(schedule.num_ranks());
  const ValueIndex index(schedule.num_stages(), schedule.num_microbatches);
  std::vector<double> value_time(index.size(), 0.0);
  std::vector<double> rank_time(num_ranks, 0.0);
  Timeline timeline{.makespan = 0.0,
                    .bubble_fraction = 0.0,
                    .busy = std::vector<double>(num_ranks, 0.0),
                    .peak_in_flight = {},
                    .spans = std::vector<TimedSpan>(schedule.actions.size())};

  const auto inputs_time = [&](int rank, const Dependencies& dependencies) {
    double time = rank_time[static_cast<size_t>(rank)];
    for (const Action& dependency : dependencies) {
      const bool remote = placement.rank_of(dependency.stage) != rank;
      time = std::max(time, value_time[index.of(dependency)] + (remote ? costs.send : 0.0));
    }
    return time;
  };
  // Runs the action at `position`, alone or as the first of a pair, in [start, end).
  const auto finish = [&](int rank, size_t position, double start, double end, double value_end) {
    value_time[index.of(schedule.actions[position])] = value_end;
    timeline.busy[static_cast<size_t>(rank)] += end - start;
    timeline.spans[position] = {start, end};
    rank_time[static_cast<size_t>(rank)] = end;
  };
  const auto num_run = run_in_order(
      schedule, [&](int64_t signed_position, const Action& action, const Dependencies& inputs) {
        const auto position = static_cast<size_t>(signed_position);
        const int rank = placement.rank_of(action.stage);
        const double start = inputs_time(rank, inputs);
        if (starts_pair.empty() || starts_pair[position] == 0) {
          const bool ends_pair =
              !starts_pair.empty() && position > 0 && starts_pair[position - 1] != 0;
          if (ends_pair) return;  // it ran with the action before it
          const double end = start + durations.of(action);
          return finish(rank, position, start, end, end);
        }
        const Action& partner = schedule.actions[position + 1];
        const double pair_start =
            std::max(start, inputs_time(rank, dependencies_of(partner, placement)));
        const double alone = durations.of(action);
        const double partner_alone = durations.of(partner);
        const double hidden = costs.overlap * std::min(alone, partner_alone);
        const double both = alone + partner_alone;
        const double pair_end = pair_start + both - hidden;
        const double cut = both > 0.0 ? pair_start + alone * (1.0 - hidden / both) : pair_start;
        finish(rank, position, pair_start, cut, pair_end);
        finish(rank, position + 1, cut, pair_end, pair_end);
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
