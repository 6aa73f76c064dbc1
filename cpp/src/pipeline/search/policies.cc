#include "search/policies.h"

#include <algorithm>
#include <cmath>

namespace megacore::pipeline {
namespace {

constexpr int kLate = std::numeric_limits<int>::max();

// One microbatch that never waits, with `stretch` more time for each hop.
struct Wave {
  std::vector<double> forward;
  std::vector<double> backward;
  std::vector<double> life;  // from F to the release of the activation
};

Wave wave_of(const Instance& instance, double stretch) {
  const auto num_stages = static_cast<size_t>(instance.num_stages());
  Wave wave{std::vector<double>(num_stages), std::vector<double>(num_stages), {}};
  const auto hop = [&](size_t s) {
    return instance.hop[s] > 0.0 || stretch > 0.0 ? instance.hop[s] + stretch : 0.0;
  };
  for (size_t s = 1; s < num_stages; ++s) {
    wave.forward[s] = wave.forward[s - 1] + instance.forward[s - 1] + hop(s);
  }
  const size_t last = num_stages - 1;
  wave.backward[last] = wave.forward[last] + instance.forward[last];
  for (size_t s = last; s-- > 0;) {
    wave.backward[s] = wave.backward[s + 1] + instance.backward[s + 1] + hop(s + 1);
  }
  for (size_t s = 0; s < num_stages; ++s) {
    wave.life.push_back(wave.backward[s] + instance.backward[s] + instance.weight[s] -
                        wave.forward[s]);
  }
  return wave;
}

// Time per microbatch that work and memory of the ranks allow.
double period_of(const Instance& instance, const Wave& wave) {
  double period = 0.0;
  for (int rank = 0; rank < instance.num_ranks(); ++rank) {
    double area = 0.0;
    for (const int32_t stage : instance.placement.stages_of(rank)) {
      const auto s = static_cast<size_t>(stage);
      area += static_cast<double>(instance.size[s]) * wave.life[s];
    }
    const auto limit = static_cast<double>(instance.limit[static_cast<size_t>(rank)]);
    period = std::max({period, instance.work(rank), area / limit});
  }
  return period;
}

// Room of every rank, shared among its stages in proportion to their lifetimes.
std::vector<int> caps_of(const Instance& instance, const Wave& wave) {
  std::vector<int> caps(wave.life.size(), 1);
  for (int rank = 0; rank < instance.num_ranks(); ++rank) {
    const auto stages = instance.placement.stages_of(rank);
    int64_t left = instance.limit[static_cast<size_t>(rank)];
    for (const int32_t stage : stages) left -= instance.size[static_cast<size_t>(stage)];
    while (true) {
      // One more for the stage that has the fewest for its lifetime.
      size_t neediest = wave.life.size();
      double need = -1.0;
      for (const int32_t stage : stages) {
        const auto s = static_cast<size_t>(stage);
        if (instance.size[s] > left || caps[s] >= instance.num_microbatches) continue;
        if (wave.life[s] / caps[s] <= need) continue;
        need = wave.life[s] / caps[s];
        neediest = s;
      }
      if (neediest == wave.life.size()) break;
      left -= instance.size[neediest];
      ++caps[neediest];
    }
  }
  return caps;
}

Policy by_time(const Instance& instance, double stretch) {
  Wave wave = wave_of(instance, stretch);
  const double period = period_of(instance, wave);
  return {.forward_keys = std::move(wave.forward),
          .backward_keys = std::move(wave.backward),
          .slope = period};
}

// Backwards before forwards; among forwards the deepest stage or the oldest microbatch first.
Policy backward_first(const Instance& instance, bool deepest) {
  Policy policy = by_time(instance, 0.0);
  const double last = policy.slope * instance.num_microbatches + policy.backward_keys.front();
  for (size_t s = 0; s < policy.forward_keys.size(); ++s) {
    policy.forward_keys[s] += last;
    if (deepest)
      policy.forward_keys[s] = (2.0 + static_cast<double>(policy.forward_keys.size() - s)) * last;
  }
  return policy;
}

double mean(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

// How long a rank waits for something more urgent.
std::vector<double> waits_of(const Instance& instance) {
  const double hop = *std::max_element(instance.hop.begin(), instance.hop.end());
  std::vector<double> waits = {0.0};
  if (hop > 0.0) waits.push_back(2.0 * hop);
  waits.push_back(mean(instance.forward));
  return waits;
}

std::vector<Policy> with_waits(const Policy& policy, const Instance& instance) {
  std::vector<Policy> policies;
  for (const double wait : waits_of(instance)) {
    policies.push_back(policy);
    policies.back().patience = wait;
  }
  return policies;
}

// What one rank runs in every period, as intervals of a circle.
class Circle {
 public:
  Circle(double period, std::vector<double> durations)
      : period_(period), left_(std::move(durations)) {}

  // The earliest start from `arrival` on that leaves room for all that is still to come: then, or
  // next to something that is there. Takes it out of what is to come.
  double place(double arrival, double duration) {
    left_.erase(std::find(left_.begin(), left_.end(), duration));
    double best = kNever;
    const auto consider = [&](double start) {
      const double delay = start - arrival;
      start -= std::floor((delay + kSameTime) / period_) * period_;
      if (start < best && fits(start, duration)) best = start;
    };
    consider(arrival);
    for (const auto& [start, length] : used_) {
      consider(start + length);
      consider(start - duration);
    }
    if (best == kNever) best = arrival;
    used_.push_back({best, duration});
    return best;
  }

 private:
  // Whether it overlaps nothing, and all that is to come fits into gaps, the longest first.
  bool fits(double start, double duration) const {
    std::vector<double> gaps;
    std::vector<std::pair<double, double>> all;
    for (const auto& [other, length] : used_) all.push_back({from(start, other), length});
    std::sort(all.begin(), all.end());
    double free = duration;
    for (const auto& [other, length] : all) {
      if (other < free - kSameTime) return false;
      gaps.push_back(other - free);
      free = other + length;
    }
    gaps.push_back(period_ - free);
    std::vector<double> left = left_;
    std::sort(left.begin(), left.end(), std::greater<>());
    for (const double length : left) {
      const auto gap = std::find_if(gaps.begin(), gaps.end(),
                                    [&](double room) { return room >= length - kSameTime; });
      if (gap == gaps.end()) return false;
      *gap -= length;
    }
    return true;
  }

  double from(double start, double other) const {
    const double way = std::fmod(other - start, period_);
    return way < -kSameTime ? way + period_ : std::max(way, 0.0);
  }

  double period_;
  std::vector<double> left_;                     // durations of what is still to come
  std::vector<std::pair<double, double>> used_;  // starts and durations
};

// A microbatch that finds its place in the period of every rank, so that all ranks can repeat it
// without a gap. Source: modulo scheduling; Rau, MICRO-27 (1994).
Policy by_period(const Instance& instance, double stretch, double back_stretch) {
  const auto num_stages = static_cast<size_t>(instance.num_stages());
  Policy policy{.forward_keys = std::vector<double>(num_stages),
                .backward_keys = std::vector<double>(num_stages),
                .slope = period_of(instance, wave_of(instance, 0.0))};
  std::vector<Circle> circles;
  for (int rank = 0; rank < instance.num_ranks(); ++rank) {
    std::vector<double> durations;
    for (const int32_t stage : instance.placement.stages_of(rank)) {
      const auto s = static_cast<size_t>(stage);
      durations.insert(durations.end(), {instance.forward[s], instance.backward[s]});
      if (instance.split) durations.push_back(instance.weight[s]);
    }
    circles.emplace_back(policy.slope, std::move(durations));
  }
  const auto circle = [&](size_t s) -> Circle& {
    return circles[static_cast<size_t>(instance.placement.rank_of(static_cast<int>(s)))];
  };
  const auto hop = [&](size_t s, double more) {
    return instance.hop[s] > 0.0 ? instance.hop[s] + more : 0.0;
  };
  double arrival = 0.0;
  for (size_t s = 0; s < num_stages; ++s) {
    if (s > 0) arrival += hop(s, stretch);
    policy.forward_keys[s] = circle(s).place(arrival, instance.forward[s]);
    arrival = policy.forward_keys[s] + instance.forward[s];
  }
  for (size_t s = num_stages; s-- > 0;) {
    policy.backward_keys[s] = circle(s).place(arrival, instance.backward[s]);
    arrival = policy.backward_keys[s] + instance.backward[s] + (s > 0 ? hop(s, back_stretch) : 0.0);
  }
  return policy;
}

}  // namespace

std::vector<Policy> standard_policies(const Instance& instance) {
  std::vector<Policy> plain = {by_time(instance, 0.0), backward_first(instance, true),
                               backward_first(instance, false),
                               by_time(instance, mean(instance.forward))};
  const std::vector<int> caps = caps_of(instance, wave_of(instance, 0.0));
  std::vector<Policy> policies;
  for (const double wait : waits_of(instance)) {
    for (const Policy& policy : plain) {
      for (const bool capped : {false, true}) {
        for (const int backlog : {kLate, 0}) {
          if (backlog == 0 && !instance.split) continue;
          policies.push_back(policy);
          policies.back().patience = wait;
          policies.back().backlog = backlog;
          if (capped) policies.back().caps = caps;
        }
      }
    }
  }
  // A split backward fills gaps with W anyhow.
  if (instance.split) return policies;
  const double half = mean(instance.forward) / 2.0;
  for (const int stretch : {0, 1, 2}) {
    for (const int back_stretch : {0, 1, 2}) {
      Policy policy = by_period(instance, stretch * half, back_stretch * half);
      policy.caps = caps;
      for (Policy& waiting : with_waits(policy, instance)) policies.push_back(std::move(waiting));
    }
  }
  return policies;
}

}  // namespace megacore::pipeline
