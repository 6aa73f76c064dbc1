#include "search/instance.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "stage_costs.h"

namespace megacore::pipeline {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max() / 4;

template <typename T>
std::vector<T> one_per(const std::vector<T>& values, int count, T otherwise) {
  if (values.empty()) return std::vector<T>(static_cast<size_t>(count), otherwise);
  if (values.size() == 1) return std::vector<T>(static_cast<size_t>(count), values.front());
  return values;
}

}  // namespace

double Instance::work(int rank) const {
  double total = 0.0;
  for (const int32_t stage : placement.stages_of(rank)) {
    const auto s = static_cast<size_t>(stage);
    total += forward[s] + backward[s] + weight[s];
  }
  return total;
}

Instance Instance::with_microbatches(int count) const {
  Instance other = *this;
  other.num_microbatches = count;
  return other;
}

Instance make_instance(const BoundProblem& problem) {
  const int num_stages = problem.placement.num_stages();
  StageCosts costs = stage_costs(problem.costs, num_stages);
  Instance instance{
      .placement = problem.placement,
      .costs = problem.costs,
      .num_microbatches = problem.num_microbatches,
      .split = problem.split_backward,
      .forward = std::move(costs.forward),
      .backward = problem.split_backward ? std::move(costs.input) : std::move(costs.backward),
      .weight = problem.split_backward ? std::move(costs.weight)
                                       : std::vector<double>(static_cast<size_t>(num_stages), 0.0),
      .hop = std::vector<double>(static_cast<size_t>(num_stages), 0.0),
      .size = one_per<int64_t>(problem.activation_size, num_stages, 1),
      .limit = one_per<int64_t>(problem.memory_limit, problem.placement.num_ranks(), kUnlimited)};
  for (int stage = 1; stage < num_stages; ++stage) {
    if (problem.placement.rank_of(stage - 1) == problem.placement.rank_of(stage)) continue;
    instance.hop[static_cast<size_t>(stage)] = costs.send;
  }
  return instance;
}

Orders orders_of(const Schedule& schedule, const Instance& instance) {
  Orders orders;
  orders.tokens.reserve(instance.num_actions());
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    for (const Action& action : schedule.rank_actions(rank)) {
      if (action.kind == ActionKind::kForward) {
        orders.tokens.push_back({action.stage, Part::kForward});
      } else if (action.kind == ActionKind::kBackwardWeight) {
        orders.tokens.push_back({action.stage, Part::kWeight});
      } else {
        orders.tokens.push_back({action.stage, Part::kBackward});
        if (action.kind == ActionKind::kBackward && instance.split) {
          orders.tokens.push_back({action.stage, Part::kWeight});
        }
      }
    }
    orders.offsets.push_back(orders.tokens.size());
  }
  return orders;
}

Schedule schedule_of(const Orders& orders, const Instance& instance, std::string name) {
  Schedule schedule{.name = std::move(name),
                    .placement = instance.placement,
                    .num_microbatches = instance.num_microbatches,
                    .forward_only = false,
                    .actions = {},
                    .offsets = {}};
  std::vector<int> counts(static_cast<size_t>(instance.num_stages()) * 3, 0);
  schedule.actions.reserve(orders.tokens.size());
  for (const Token& token : orders.tokens) {
    const ActionKind kind = token.part == Part::kForward  ? ActionKind::kForward
                            : token.part == Part::kWeight ? ActionKind::kBackwardWeight
                            : instance.split              ? ActionKind::kBackwardInput
                                                          : ActionKind::kBackward;
    schedule.actions.push_back({token.stage, kind, counts[slot_of(token)]++});
  }
  for (const size_t offset : orders.offsets) {
    schedule.offsets.push_back(static_cast<int64_t>(offset));
  }
  return schedule;
}

std::vector<int64_t> peak_memory(const Orders& orders, const Instance& instance) {
  std::vector<int64_t> peaks(instance.limit.size(), 0);
  for (size_t rank = 0; rank < peaks.size(); ++rank) {
    int64_t held = 0;
    for (size_t i = orders.offsets[rank]; i < orders.offsets[rank + 1]; ++i) {
      held += instance.held_by(orders.tokens[i]);
      peaks[rank] = std::max(peaks[rank], held);
    }
  }
  return peaks;
}

bool fits_memory(const Orders& orders, const Instance& instance) {
  const std::vector<int64_t> peaks = peak_memory(orders, instance);
  return std::equal(peaks.begin(), peaks.end(), instance.limit.begin(), std::less_equal<>());
}

bool leaves_room(const Instance& instance,
                 const std::vector<int>& counts,
                 int64_t held,
                 int stage) {
  const auto done = [&](int32_t other, Part part) { return counts[slot_of({other, part})]; };
  const auto s = static_cast<size_t>(stage);
  const int rank = instance.placement.rank_of(stage);
  const int microbatch = done(stage, Part::kForward);
  const int64_t limit = instance.limit[static_cast<size_t>(rank)];
  if (held + instance.size[s] > limit) return false;
  const auto stages = instance.placement.stages_of(rank);
  for (const int32_t later : stages) {
    const int oldest = done(later, Part::kForward);
    if (later <= stage || oldest >= microbatch) continue;
    // Room for microbatch `oldest`, when all before it are gone: what it and later ones hold now,
    // this F, and its own forwards to come.
    int64_t room = instance.size[s];
    for (const int32_t other : stages) {
      const int forwards = done(other, Part::kForward);
      const int64_t size = instance.size[static_cast<size_t>(other)];
      room += size * std::max(forwards - std::max(done(other, instance.release()), oldest), 0);
      if (forwards <= oldest) room += size;
    }
    if (room > limit) return false;
  }
  return true;
}

OrderTimer::OrderTimer(const Instance& instance)
    : instance_(instance),
      counts_(static_cast<size_t>(instance.num_stages()) * 3),
      position_(static_cast<size_t>(instance.num_ranks())),
      rank_time_(position_.size()),
      blocked_on_(position_.size()) {
  for (auto& ends : ends_) {
    ends.resize(static_cast<size_t>(instance.num_stages()) *
                static_cast<size_t>(instance.num_microbatches));
  }
}

double OrderTimer::makespan(const Orders& orders) {
  for (auto& ends : ends_) std::fill(ends.begin(), ends.end(), kNever);
  std::fill(counts_.begin(), counts_.end(), 0);
  std::fill(rank_time_.begin(), rank_time_.end(), 0.0);
  std::copy(orders.offsets.begin(), orders.offsets.end() - 1, position_.begin());
  starts_.resize(orders.tokens.size());
  ready_.clear();
  for (int rank = instance_.num_ranks() - 1; rank >= 0; --rank) {
    blocked_on_[static_cast<size_t>(rank)] = -1;
    ready_.push_back(rank);
  }
  while (!ready_.empty()) {
    const int rank = ready_.back();
    ready_.pop_back();
    run_rank(orders, rank);
  }
  bool complete = true;
  for (size_t rank = 0; rank < position_.size(); ++rank) {
    complete = complete && position_[rank] == orders.offsets[rank + 1];
  }
  return complete ? *std::max_element(rank_time_.begin(), rank_time_.end()) : kNever;
}

// When the inputs of an action are there: kNever before they are made.
double OrderTimer::ready_time(const Token& token, int microbatch) const {
  const auto stage = static_cast<size_t>(token.stage);
  if (token.part == Part::kForward) {
    if (stage == 0) return 0.0;
    return ends_[0][instance_.at(token.stage - 1, microbatch)] + instance_.hop[stage];
  }
  if (token.part == Part::kWeight) return ends_[1][instance_.at(token.stage, microbatch)];
  const double own = ends_[0][instance_.at(token.stage, microbatch)];
  if (token.stage + 1 == instance_.num_stages()) return own;
  return std::max(own,
                  ends_[1][instance_.at(token.stage + 1, microbatch)] + instance_.hop[stage + 1]);
}

// Runs a rank until it must wait for another one; wakes those that wait for it.
void OrderTimer::run_rank(const Orders& orders, int rank) {
  const auto r = static_cast<size_t>(rank);
  for (size_t& here = position_[r]; here < orders.offsets[r + 1]; ++here) {
    const Token& token = orders.tokens[here];
    int& count = counts_[slot_of(token)];
    const double ready = ready_time(token, count);
    if (ready == kNever) {
      blocked_on_[r] = static_cast<int>(slot_of(token));
      return;
    }
    const double start = std::max(ready, rank_time_[r]);
    const double end = start + instance_.duration(token);
    starts_[here] = start;
    rank_time_[r] = end;
    if (token.part != Part::kWeight) {
      ends_[token.part == Part::kForward ? 0 : 1][instance_.at(token.stage, count)] = end;
      const int reader = token.stage + (token.part == Part::kForward ? 1 : -1);
      if (reader >= 0 && reader < instance_.num_stages()) {
        const auto other = static_cast<size_t>(instance_.placement.rank_of(reader));
        const Token waiting{reader, token.part};
        if (blocked_on_[other] == static_cast<int>(slot_of(waiting))) {
          blocked_on_[other] = -1;
          ready_.push_back(static_cast<int32_t>(other));
        }
      }
    }
    ++count;
  }
}

}  // namespace megacore::pipeline
