#include "search/exact_search.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <unordered_map>
#include <utility>

namespace megacore::pipeline {
namespace {

// The largest unit of which all times are multiples, or 0 when there is none of a sensible size.
double unit_of(const Instance& instance) {
  double unit = 0.0;
  const auto join = [&](double value) {
    constexpr double kSmallestUnit = 1e-7;
    while (value > kSmallestUnit)
      unit = std::exchange(value, std::fmod(unit + kSmallestUnit / 2, value));
  };
  for (const auto* times :
       {&instance.forward, &instance.backward, &instance.weight, &instance.hop}) {
    for (const double time : *times) join(time);
  }
  return unit > 1e-3 ? unit : 0.0;
}

class Search {
 public:
  Search(const Instance& instance, const ExactSearch& search)
      : instance_(instance),
        search_(search),
        unit_(unit_of(instance)),
        num_ranks_(static_cast<size_t>(instance.num_ranks())),
        num_stages_(static_cast<size_t>(instance.num_stages())),
        count_(num_stages_ * 3, 0),
        free_at_(num_ranks_, 0.0),
        held_(num_ranks_, 0),
        last_(num_stages_),
        result_{std::nullopt, search.below, false, 0} {
    for (auto& ends : ends_) {
      ends.assign(num_stages_ * static_cast<size_t>(instance.num_microbatches), 0.0);
    }
  }

  ExactResult run() && {
    const bool over = descend(0.0, 0);
    result_.is_complete = over;
    return std::move(result_);
  }

 private:
  struct Step {
    Token token;
    double start;
    double bound;
  };

  int count(int stage, Part part) const { return count_[slot_of({stage, part})]; }
  int num_left(int stage, Part part) const {
    return instance_.num_microbatches - count(stage, part);
  }
  size_t rank_of(int stage) const {
    return static_cast<size_t>(instance_.placement.rank_of(stage));
  }

  // When the inputs of the next action of a stage are there; kNever when they are not yet planned.
  double arrival(int stage, Part part) const {
    const int microbatch = count(stage, part);
    const auto s = static_cast<size_t>(stage);
    if (microbatch == instance_.num_microbatches) return kNever;
    if (part == Part::kForward) {
      if (stage == 0) return 0.0;
      if (count(stage - 1, Part::kForward) <= microbatch) return kNever;
      return ends_[0][instance_.at(stage - 1, microbatch)] + instance_.hop[s];
    }
    if (part == Part::kWeight) {
      const bool there = instance_.split && count(stage, Part::kBackward) > microbatch;
      return there ? ends_[1][instance_.at(stage, microbatch)] : kNever;
    }
    if (count(stage, Part::kForward) <= microbatch) return kNever;
    const double own = ends_[0][instance_.at(stage, microbatch)];
    if (s + 1 == num_stages_) return own;
    if (count(stage + 1, Part::kBackward) <= microbatch) return kNever;
    return std::max(own, ends_[1][instance_.at(stage + 1, microbatch)] + instance_.hop[s + 1]);
  }

  // Actions that start at `now` or later, in the order of time and rank; what could start before
  // and did not waits until its rank has run something else. Returns whether all is searched.
  bool descend(double now, size_t now_rank) {
    if (++result_.num_nodes > search_.max_nodes) return false;
    if (path_.size() == instance_.num_actions()) return finish();
    if (is_dominated(now, now_rank)) return true;
    std::vector<Step> steps = next_steps(now, now_rank);
    for (Step& step : steps) {
      apply(step);
      step.bound = bound(step.start);
      undo(step);
    }
    std::stable_sort(steps.begin(), steps.end(), [](const Step& a, const Step& b) {
      if (std::abs(a.bound - b.bound) > kSameTime) return a.bound < b.bound;
      return a.start < b.start - kSameTime;
    });
    for (const Step& step : steps) {
      if (step.bound >= result_.makespan - kSameTime) return true;
      apply(step);
      const bool over = descend(step.start, rank_of(step.token.stage));
      undo(step);
      if (!over) return false;
      if (result_.makespan <= search_.target + kSameTime) return true;
    }
    return true;
  }

  bool finish() {
    const double makespan = *std::max_element(free_at_.begin(), free_at_.end());
    if (makespan >= result_.makespan - kSameTime) return true;
    result_.makespan = makespan;
    Orders orders;
    for (size_t rank = 0; rank < num_ranks_; ++rank) {
      for (const Token& token : path_) {
        if (rank_of(token.stage) == rank) orders.tokens.push_back(token);
      }
      orders.offsets.push_back(orders.tokens.size());
    }
    result_.orders = std::move(orders);
    return true;
  }

  bool is_past(double start, size_t rank, double now, size_t now_rank) const {
    return start < now - kSameTime || (start < now + kSameTime && rank < now_rank);
  }

  std::vector<Step> next_steps(double now, size_t now_rank) const {
    std::vector<Step> steps;
    for (size_t rank = 0; rank < num_ranks_; ++rank) {
      const size_t first = steps.size();
      double earliest_end = kNever;  // of an action that never hurts when it runs early
      for (const int32_t stage : instance_.placement.stages_of(static_cast<int>(rank))) {
        for (const Part part : {Part::kForward, Part::kBackward, Part::kWeight}) {
          const double ready = arrival(stage, part);
          if (ready == kNever) continue;
          const double start = std::max(ready, free_at_[rank]);
          const Token token{stage, part};
          if (part == Part::kForward &&
              held_[rank] + instance_.size[static_cast<size_t>(stage)] > instance_.limit[rank]) {
            continue;
          }
          if (is_past(start, rank, now, now_rank)) continue;
          steps.push_back({token, start, 0.0});
          if (part == Part::kForward) continue;
          earliest_end = std::min(earliest_end, start + instance_.duration(token));
        }
      }
      // Whatever starts after that could let it go first for nothing.
      const auto own = steps.begin() + static_cast<std::ptrdiff_t>(first);
      steps.erase(
          std::remove_if(own, steps.end(),
                         [&](const Step& step) { return step.start > earliest_end - kSameTime; }),
          steps.end());
    }
    return steps;
  }

  void apply(const Step& step) {
    const auto [token, start, unused] = step;
    const size_t rank = rank_of(token.stage);
    const int microbatch = count_[slot_of(token)]++;
    const double end = start + instance_.duration(token);
    if (token.part != Part::kWeight) {
      ends_[token.part == Part::kForward ? 0 : 1][instance_.at(token.stage, microbatch)] = end;
    }
    held_[rank] += instance_.held_by(token);
    saved_.push_back(free_at_[rank]);
    free_at_[rank] = end;
    path_.push_back(token);
  }

  void undo(const Step& step) {
    const size_t rank = rank_of(step.token.stage);
    path_.pop_back();
    free_at_[rank] = saved_.back();
    saved_.pop_back();
    held_[rank] -= instance_.held_by(step.token);
    --count_[slot_of(step.token)];
  }

  // No completion of the partial solution ends before this.
  double bound(double now) {
    double latest = 0.0;
    const auto free_at = [&](int stage) { return std::max(free_at_[rank_of(stage)], now); };
    const int last_stage = static_cast<int>(num_stages_) - 1;
    // Earliest ends of the last F of every stage, and of the next one.
    double next_end = 0.0;
    for (int s = 0; s <= last_stage; ++s) {
      Last& last = last_[static_cast<size_t>(s)];
      const double duration = instance_.forward[static_cast<size_t>(s)];
      const int left = num_left(s, Part::kForward);
      const double hop = instance_.hop[static_cast<size_t>(s)];
      const double known = arrival(s, Part::kForward);
      const double ready = known < kNever ? known : next_end + hop;
      next_end = std::max(ready, free_at(s)) + duration;
      last.forward = left == 0 ? 0.0 : next_end + (left - 1) * duration;
      if (left > 0 && s > 0) {
        last.forward =
            std::max(last.forward, last_[static_cast<size_t>(s) - 1].forward + hop + duration);
      }
      if (left == 0) next_end = 0.0;
    }
    for (int s = last_stage; s >= 0; --s) {
      Last& last = last_[static_cast<size_t>(s)];
      const double duration = instance_.backward[static_cast<size_t>(s)];
      const int left = num_left(s, Part::kBackward);
      const double hop = s < last_stage ? instance_.hop[static_cast<size_t>(s) + 1] : 0.0;
      const double known = arrival(s, Part::kBackward);
      const double ready = known < kNever ? known : next_end + hop;
      next_end = std::max(ready, free_at(s)) + duration;
      last.backward = left == 0 ? 0.0 : next_end + (left - 1) * duration;
      if (left > 0) {
        last.backward = std::max(last.backward, last.forward + duration);
        if (s < last_stage) {
          last.backward =
              std::max(last.backward, last_[static_cast<size_t>(s) + 1].backward + hop + duration);
        }
        last.backward = std::max(last.backward, free_at(s) + work_before_last(s));
      } else {
        next_end = 0.0;
      }
      latest = std::max(
          {latest, last.backward + (left > 0 ? instance_.weight[static_cast<size_t>(s)] : 0.0),
           free_at(s) + work_left(s)});
    }
    latest = std::max(latest, *std::max_element(free_at_.begin(), free_at_.end()));
    return unit_ > 0.0 ? std::ceil(latest / unit_ - 1e-6) * unit_ : latest;
  }

  // What the rank of a stage must run up to the end of the last backward of the stage.
  double work_before_last(int stage) const {
    double work = 0.0;
    for (const int32_t s : instance_.placement.stages_of(instance_.placement.rank_of(stage))) {
      work += num_left(s, Part::kForward) * instance_.forward[static_cast<size_t>(s)];
      if (s >= stage)
        work += num_left(s, Part::kBackward) * instance_.backward[static_cast<size_t>(s)];
    }
    return work;
  }

  double work_left(int stage) const {
    double work = 0.0;
    for (const int32_t s : instance_.placement.stages_of(instance_.placement.rank_of(stage))) {
      for (const Part part : {Part::kForward, Part::kBackward, Part::kWeight}) {
        work += num_left(s, part) * instance_.duration({s, part});
      }
    }
    return work;
  }

  // Remembers the partial solution, unless one with the same actions was nowhere later and could
  // still run all that this one can.
  bool is_dominated(double now, size_t now_rank) {
    std::string key;
    for (const int n : count_) key.push_back(static_cast<char>(n));
    std::vector<double> times;
    for (size_t rank = 0; rank < num_ranks_; ++rank) times.push_back(std::max(free_at_[rank], now));
    for (int s = 0; s < static_cast<int>(num_stages_); ++s) {
      const size_t rank = rank_of(s);
      for (const Part part : {Part::kForward, Part::kBackward, Part::kWeight}) {
        const double ready = arrival(s, part);
        if (ready == kNever) continue;
        const bool blocked = is_past(std::max(ready, free_at_[rank]), rank, now, now_rank);
        times.push_back(blocked ? 1.0 : 0.0);
      }
      append_arrivals(s, times[rank], times);
    }
    auto& others = seen_[std::move(key)];
    for (const std::vector<double>& other : others) {
      if (std::equal(other.begin(), other.end(), times.begin(),
                     [](double a, double b) { return a <= b + kSameTime; })) {
        return true;
      }
    }
    constexpr size_t kMostPerKey = 24;
    if (others.size() < kMostPerKey) others.push_back(std::move(times));
    return false;
  }

  // Arrivals of all messages that wait for a stage, no earlier than its rank is free.
  void append_arrivals(int stage, double free, std::vector<double>& times) const {
    const auto s = static_cast<size_t>(stage);
    if (stage > 0) {
      for (int j = count(stage, Part::kForward); j < count(stage - 1, Part::kForward); ++j) {
        times.push_back(std::max(free, ends_[0][instance_.at(stage - 1, j)] + instance_.hop[s]));
      }
    }
    if (s + 1 == num_stages_) return;
    for (int j = count(stage, Part::kBackward); j < count(stage + 1, Part::kBackward); ++j) {
      times.push_back(std::max(free, ends_[1][instance_.at(stage + 1, j)] + instance_.hop[s + 1]));
    }
  }

  struct Last {
    double forward;
    double backward;
  };

  const Instance& instance_;
  ExactSearch search_;
  double unit_;
  size_t num_ranks_;
  size_t num_stages_;
  std::vector<int> count_;  // [stage * 3 + part]
  std::array<std::vector<double>, 2> ends_;
  std::vector<double> free_at_;
  std::vector<int64_t> held_;
  std::vector<double> saved_;  // free_at_ before each action of the path
  std::vector<Token> path_;
  std::vector<Last> last_;  // scratch of bound()
  std::unordered_map<std::string, std::vector<std::vector<double>>> seen_;
  ExactResult result_;
};

}  // namespace

bool can_search_exactly(const Instance& instance) {
  const auto positive = [](double time) { return time > 0.0; };
  return instance.num_microbatches < 128 &&
         std::all_of(instance.forward.begin(), instance.forward.end(), positive) &&
         std::all_of(instance.backward.begin(), instance.backward.end(), positive) &&
         (!instance.split || std::all_of(instance.weight.begin(), instance.weight.end(), positive));
}

ExactResult search_exactly(const Instance& instance, const ExactSearch& search) {
  return Search(instance, search).run();
}

}  // namespace megacore::pipeline
