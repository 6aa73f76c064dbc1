#include "search/justify.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "search/random.h"

namespace megacore::pipeline {
namespace {

// What one rank runs, with gaps.
class Row {
 public:
  void clear() { spans_.clear(); }

  // Takes the first gap from `ready` on and returns its start.
  double place(double ready, double duration) {
    auto at = std::upper_bound(
        spans_.begin(), spans_.end(), ready + kSameTime, [](double time, const Span& span) {
          return time < span.end;
        });
    double start = ready;
    for (; at != spans_.end() && at->begin < start + duration - kSameTime; ++at) start = at->end;
    spans_.insert(at, {start, start + duration});
    return start;
  }

 private:
  struct Span {
    double begin;
    double end;
  };
  std::vector<Span> spans_;  // ascending
};

// Actions are numbered so that each comes after all that must run before it.
class Justifier {
 public:
  Justifier(OrderTimer& timer, const Instance& instance, const OrderSearch& search)
      : timer_(timer),
        instance_(instance),
        search_(search),
        num_stages_(static_cast<size_t>(instance.num_stages())),
        parts_(instance.split ? 3 : 2),
        rows_(static_cast<size_t>(instance.num_ranks())),
        random_(search.seed) {
    for (size_t i = 0; i < instance.num_actions(); ++i) actions_.push_back(action_of(i));
  }

  FoundOrders run(Orders orders) && {
    FoundOrders found{std::move(orders), 0.0, 0};
    found.makespan = timer_.makespan(found.orders);
    std::vector<double> best = starts_of(found.orders);
    for (int round = 0; found.makespan > search_.target + kSameTime; ++round) {
      if (num_placed_ >= search_.max_actions) break;
      starts_ = best;
      if (round > 0) move_at_random();
      squeeze(found.makespan);
      Orders other = orders_now();
      const double makespan = timer_.makespan(other);
      if (makespan > found.makespan + kSameTime || !fits_memory(other, instance_)) continue;
      found.orders = std::move(other);
      found.makespan = makespan;
      best = starts_;
    }
    found.num_scheduled = num_placed_;
    return found;
  }

 private:
  // Ends `delay` before another action starts, or earlier.
  struct Input {
    size_t action;
    double delay;
  };
  struct Numbered {
    Token token;
    size_t rank;
    double duration;
    std::array<Input, 2> inputs;
    size_t num_inputs;

    std::span<const Input> before() const { return std::span(inputs).first(num_inputs); }
  };

  size_t number(int stage, Part part, int microbatch) const {
    const auto s = static_cast<size_t>(stage);
    const size_t place = part == Part::kBackward ? num_stages_ - 1 - s : s;
    return (static_cast<size_t>(microbatch) * parts_ + static_cast<size_t>(part)) * num_stages_ +
           place;
  }

  Numbered action_of(size_t i) const {
    const auto part = static_cast<Part>(i / num_stages_ % parts_);
    const size_t place = i % num_stages_;
    const auto stage =
        static_cast<int32_t>(part == Part::kBackward ? num_stages_ - 1 - place : place);
    const auto microbatch = static_cast<int>(i / num_stages_ / parts_);
    Numbered action{.token = {stage, part},
                    .rank = static_cast<size_t>(instance_.placement.rank_of(stage)),
                    .duration = instance_.duration({stage, part}),
                    .inputs = {},
                    .num_inputs = 0};
    const auto add = [&](int from, Part made, int of, double delay) {
      action.inputs[action.num_inputs++] = {number(from, made, of), delay};
    };
    const auto s = static_cast<size_t>(stage);
    if (microbatch > 0) add(stage, part, microbatch - 1, 0.0);
    if (part == Part::kForward) {
      if (s > 0) add(stage - 1, part, microbatch, instance_.hop[s]);
    } else if (part == Part::kBackward && s + 1 < num_stages_) {
      add(stage + 1, part, microbatch, instance_.hop[s + 1]);
    } else {
      add(stage, part == Part::kWeight ? Part::kBackward : Part::kForward, microbatch, 0.0);
    }
    return action;
  }

  std::vector<double> starts_of(const Orders& orders) const {
    std::vector<double> starts(actions_.size());
    std::vector<int> counts(num_stages_ * parts_, 0);
    for (size_t i = 0; i < orders.tokens.size(); ++i) {
      const auto [stage, part] = orders.tokens[i];
      int& count = counts[static_cast<size_t>(stage) * parts_ + static_cast<size_t>(part)];
      starts[number(stage, part, count++)] = timer_.starts()[i];
    }
    return starts;
  }

  // By up to a half, one or one and a half actions to either side.
  void move_at_random() {
    constexpr int64_t kSteps = 1000;
    const double most = static_cast<double>(1 + random_.below(3)) * mean_duration();
    for (double& start : starts_) {
      start += most * (static_cast<double>(random_.below(kSteps)) / kSteps - 0.5);
    }
    for (size_t i = 0; i < starts_.size(); ++i) {
      for (const Input& input : actions_[i].before()) {
        starts_[i] = std::max(starts_[i], starts_[input.action]);
      }
    }
    to_left();
  }

  double mean_duration() const {
    double sum = 0.0;
    for (const Numbered& action : actions_) sum += action.duration;
    return sum / static_cast<double>(actions_.size());
  }

  // To the right and to the left as long as it gets shorter.
  void squeeze(double end) {
    double makespan = kNever;
    while (true) {
      to_right(end);
      const double shorter = to_left();
      if (shorter >= makespan - kSameTime) return;
      makespan = shorter;
    }
  }

  // Sorts by key, of those that are the same by number.
  void sort_by(const auto& key_of) {
    sorted_.clear();
    for (size_t i = 0; i < actions_.size(); ++i) sorted_.push_back({key_of(i), i});
    std::sort(sorted_.begin(), sorted_.end());
  }

  // Returns the end of all.
  double to_left() {
    sort_by([&](size_t i) { return starts_[i]; });
    for (Row& row : rows_) row.clear();
    double end = 0.0;
    for (const auto& [key, i] : sorted_) {
      const Numbered& action = actions_[i];
      double ready = 0.0;
      for (const Input& input : action.before()) {
        const double made = starts_[input.action] + actions_[input.action].duration;
        ready = std::max(ready, made + input.delay);
      }
      starts_[i] = rows_[action.rank].place(ready, action.duration);
      end = std::max(end, starts_[i] + action.duration);
    }
    num_placed_ += static_cast<int64_t>(actions_.size());
    return end;
  }

  // All ends no later than `end`, if that can be; within, times are counted from there.
  void to_right(double end) {
    sort_by([&](size_t i) { return starts_[i] + actions_[i].duration; });
    for (Row& row : rows_) row.clear();
    ready_.assign(actions_.size(), 0.0);
    for (size_t at = sorted_.size(); at-- > 0;) {
      const size_t i = sorted_[at].second;
      const Numbered& action = actions_[i];
      const double start = rows_[action.rank].place(ready_[i], action.duration);
      for (const Input& input : action.before()) {
        double& ready = ready_[input.action];
        ready = std::max(ready, start + action.duration + input.delay);
      }
      starts_[i] = end - start - action.duration;
    }
    num_placed_ += static_cast<int64_t>(actions_.size());
  }

  Orders orders_now() {
    Orders orders;
    orders.tokens.reserve(actions_.size());
    std::vector<std::vector<Token>> tokens(rows_.size());
    sort_by([&](size_t i) { return starts_[i]; });
    for (const auto& [key, i] : sorted_) tokens[actions_[i].rank].push_back(actions_[i].token);
    for (const auto& row : tokens) {
      orders.tokens.insert(orders.tokens.end(), row.begin(), row.end());
      orders.offsets.push_back(orders.tokens.size());
    }
    return orders;
  }

  OrderTimer& timer_;
  const Instance& instance_;
  OrderSearch search_;
  size_t num_stages_;
  size_t parts_;
  std::vector<Row> rows_;
  Random random_;
  std::vector<Numbered> actions_;
  std::vector<double> starts_;
  int64_t num_placed_ = 0;
  // Scratch.
  std::vector<std::pair<double, size_t>> sorted_;
  std::vector<double> ready_;
};

}  // namespace

FoundOrders justify_orders(OrderTimer& timer,
                           const Instance& instance,
                           Orders orders,
                           const OrderSearch& search) {
  return Justifier(timer, instance, search).run(std::move(orders));
}

}  // namespace megacore::pipeline
