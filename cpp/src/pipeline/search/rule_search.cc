#include "search/rule_search.h"

#include <algorithm>
#include <array>
#include <utility>

#include "megacore/base/splitmix.h"

namespace megacore::pipeline {
namespace {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  // Uniform enough in [0, count). REQUIRES: 1 <= count < 2^32.
  size_t below(size_t count) { return static_cast<size_t>(((next() >> 32) * count) >> 32); }
  bool coin() { return (next() & 1) != 0; }

 private:
  uint64_t next() { return base::mixed(state_ += base::kGolden); }

  uint64_t state_;
};

double mean_duration(const Instance& instance) {
  double sum = 0.0;
  for (size_t s = 0; s < instance.forward.size(); ++s)
    sum += instance.forward[s] + instance.backward[s];
  return sum / (2.0 * static_cast<double>(instance.forward.size()));
}

class Mutation {
 public:
  Mutation(const Instance& instance, uint64_t seed)
      : instance_(instance), unit_(mean_duration(instance)), random_(seed) {}

  void apply(Policy& policy) {
    do {
      change(policy);
    } while (random_.below(3) == 0);
  }

 private:
  void change(Policy& policy) {
    const size_t s = random_.below(policy.forward_keys.size());
    switch (random_.below(8)) {
      case 0:  // all later forwards
        return shift(policy.forward_keys, s, policy.forward_keys.size());
      case 1:  // all later backwards
        return shift(policy.backward_keys, 0, s + 1);
      case 2:
        return shift(policy.forward_keys, s, s + 1);
      case 3:
        return shift(policy.backward_keys, s, s + 1);
      case 4:
        return change_cap(policy, s);
      case 5:
        policy.patience = unit_ * static_cast<double>(random_.below(9)) / 4.0;
        return;
      case 6:
        policy.backlog = std::array{std::numeric_limits<int>::max(), 0, 1, 2, 4}[random_.below(5)];
        return;
      default:
        policy.slope *= std::array{0.8, 0.95, 1.05, 1.25}[random_.below(4)];
    }
  }

  void shift(std::vector<double>& keys, size_t begin, size_t end) {
    const double step = unit_ * std::array{0.25, 0.5, 1.0, 2.0, 4.0}[random_.below(5)];
    const double by = random_.coin() ? step : -step;
    for (size_t s = begin; s < end; ++s) keys[s] += by;
  }

  void change_cap(Policy& policy, size_t s) {
    if (policy.caps.empty())
      policy.caps.assign(policy.forward_keys.size(), instance_.num_microbatches);
    int& cap = policy.caps[s];
    const int64_t room =
        instance_.limit[static_cast<size_t>(instance_.placement.rank_of(static_cast<int>(s)))];
    const auto most = static_cast<int>(std::min<int64_t>(room, instance_.num_microbatches));
    cap = std::clamp(std::min(cap, most) + (random_.coin() ? 1 : -1), 1, most);
  }

  const Instance& instance_;
  double unit_;
  Random random_;
};

}  // namespace

FoundRule search_rule(ListScheduler& scheduler,
                      const Instance& instance,
                      Policy policy,
                      const RuleSearch& search) {
  const auto cost = static_cast<int64_t>(instance.num_actions());
  FoundRule best{policy, scheduler.run(policy), cost};
  Mutation mutation(instance, search.seed);
  while (best.makespan > search.target + kSameTime &&
         best.num_scheduled + cost <= search.max_actions) {
    Policy other = best.policy;
    mutation.apply(other);
    const double makespan = scheduler.run(other, best.makespan + kSameTime);
    best.num_scheduled += cost;
    if (makespan == kNever) continue;
    best.makespan = makespan;
    best.policy = std::move(other);
  }
  return best;
}

}  // namespace megacore::pipeline
