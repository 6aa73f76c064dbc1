#include "megacore/pipeline/simulate.h"

#include <algorithm>
#include <cmath>

#include "dependencies.h"
#include "megacore/base/check.h"
#include "stage_costs.h"

namespace megacore::pipeline {
namespace {

double duration_of(const Action& action, const StageCosts& costs) {
  const auto stage = static_cast<size_t>(action.stage);
  switch (action.kind) {
    case ActionKind::kForward:
      return costs.forward[stage];
    case ActionKind::kBackward:
      return costs.backward[stage];
    case ActionKind::kBackwardInput:
      return costs.input[stage];
    default:
      return costs.weight[stage];
  }
}

int64_t peak_in_flight(std::span<const Action> actions, bool forward_only) {
  int64_t held = 0;
  int64_t peak = 0;
  for (const Action& action : actions) {
    if (action.kind == ActionKind::kForward) peak = std::max(peak, ++held);
    if (frees_activation(action.kind) || forward_only) --held;
  }
  return peak;
}

// Runs a schedule on a clock of its own per rank.
class Simulation {
 public:
  Simulation(const Schedule& schedule, const Costs& costs, const std::vector<double>& backward)
      : schedule_(schedule),
        costs_(stage_costs(costs, schedule.num_stages(), backward)),
        overlap_(costs.overlap),
        starts_pair_(pair_starts(schedule)),
        index_(schedule.num_stages(), schedule.num_microbatches),
        value_time_(index_.size(), 0.0),
        rank_time_(static_cast<size_t>(schedule.num_ranks()), 0.0),
        timeline_{.makespan = 0.0,
                  .bubble_fraction = 0.0,
                  .busy = std::vector<double>(rank_time_.size(), 0.0),
                  .peak_in_flight = {},
                  .spans = std::vector<TimedSpan>(schedule.actions.size()),
                  .exposed = std::vector<double>(rank_time_.size(), 0.0),
                  .send = costs.send} {}

  Timeline run() && {
    const auto num_run = run_in_order(
        schedule_, [&](int64_t position, const Action& action, const Dependencies& inputs) {
          run_action(static_cast<size_t>(position), action, inputs);
        });
    if (!is_complete(schedule_, num_run)) {
      throw std::invalid_argument(deadlock_report(schedule_, num_run));
    }
    double busy = 0.0;
    for (size_t rank = 0; rank < rank_time_.size(); ++rank) {
      timeline_.makespan = std::max(timeline_.makespan, rank_time_[rank]);
      busy += timeline_.busy[rank];
      timeline_.peak_in_flight.push_back(
          peak_in_flight(schedule_.rank_actions(static_cast<int>(rank)), schedule_.forward_only));
    }
    MC_REQUIRE(std::isfinite(timeline_.makespan),
               "the costs add up to more than a number can hold; choose a larger unit of time");
    const double available = timeline_.makespan * static_cast<double>(rank_time_.size());
    if (available > 0.0) timeline_.bubble_fraction = 1.0 - busy / available;
    return std::move(timeline_);
  }

 private:
  void run_action(size_t position, const Action& action, const Dependencies& inputs) {
    const int rank = schedule_.placement.rank_of(action.stage);
    if (is_pair(position)) return run_pair(rank, position, inputs);
    if (position > 0 && is_pair(position - 1)) return;  // it ran with the action before it
    const double start = inputs_time(rank, inputs, costs_.send);
    expose(rank, start, inputs_time(rank, inputs, 0.0));
    const double end = start + duration_of(action, costs_);
    finish(rank, position, {start, end}, end);
  }

  void run_pair(int rank, size_t position, const Dependencies& inputs) {
    const Action& second = schedule_.actions[position + 1];
    const Dependencies others = dependencies_of(second, schedule_.placement);
    const auto both_there = [&](double send) {
      return std::max(inputs_time(rank, inputs, send), inputs_time(rank, others, send));
    };
    const double start = both_there(costs_.send);
    expose(rank, start, both_there(0.0));
    const double alone = duration_of(schedule_.actions[position], costs_);
    const double both = alone + duration_of(second, costs_);
    const double hidden = overlap_ * std::min(alone, both - alone);
    const double end = start + both - hidden;
    const double cut = both > 0.0 ? start + alone * (1.0 - hidden / both) : start;
    finish(rank, position, {start, cut}, end);
    finish(rank, position + 1, {cut, end}, end);
  }

  bool is_pair(size_t position) const {
    return !starts_pair_.empty() && starts_pair_[position] != 0;
  }

  // When the rank is free and all inputs have arrived, if a message takes `send`.
  double inputs_time(int rank, const Dependencies& dependencies, double send) const {
    double time = rank_time_[static_cast<size_t>(rank)];
    for (const Action& dependency : dependencies) {
      const bool remote = schedule_.placement.rank_of(dependency.stage) != rank;
      time = std::max(time, value_time_[index_.of(dependency)] + (remote ? send : 0.0));
    }
    return time;
  }

  // An action starts later than it would if messages took no time.
  void expose(int rank, double start, double start_without_messages) {
    timeline_.exposed[static_cast<size_t>(rank)] += start - start_without_messages;
  }

  void finish(int rank, size_t position, const TimedSpan& span, double value_time) {
    value_time_[index_.of(schedule_.actions[position])] = value_time;
    timeline_.busy[static_cast<size_t>(rank)] += span.end - span.start;
    timeline_.spans[position] = span;
    rank_time_[static_cast<size_t>(rank)] = span.end;
  }

  const Schedule& schedule_;
  StageCosts costs_;
  double overlap_;
  std::vector<uint8_t> starts_pair_;
  ValueIndex index_;
  std::vector<double> value_time_;  // by value: when it is there
  std::vector<double> rank_time_;   // by rank: end of its last action
  Timeline timeline_;
};

}  // namespace

Timeline simulate(const Schedule& schedule,
                  const Costs& costs,
                  const std::vector<double>& backward) {
  MC_REQUIRE(costs.overlap >= 0.0 && costs.overlap <= 1.0,
             "cost 'overlap' is {}; it is the share that is hidden, from 0 to 1", costs.overlap);
  return Simulation(schedule, costs, backward).run();
}

}  // namespace megacore::pipeline
