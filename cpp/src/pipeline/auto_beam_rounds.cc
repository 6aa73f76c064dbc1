#include "auto_beam_rounds.h"

#include <algorithm>
#include <utility>

#include "auto_reverse.h"
#include "deadline_bound.h"

namespace megacore::pipeline {
namespace {

// Actions to schedule. Beams are as wide as that allows for a few of them.
constexpr int64_t kActions = 1'000'000;
constexpr int64_t kBeams = 7;
constexpr int64_t kWidest = 100;
// Deadlines are those for an end so far above the bound.
constexpr double kEnd = 1.005;
constexpr int64_t kDeadlineSteps = 200'000;
constexpr double kPullForward = 0.1;
constexpr double kPullFromEnd = 0.4;
// So far above the bound a schedule for fewer microbatches is asked for, if these are a few times
// the ranks. Its middle is drawn out, a little slower than the bound grows.
constexpr double kFar = 1.005;
constexpr int kFewest = 2;
constexpr double kSlower = 1.03;
// What is slower than the best by less can become the best by local improvement.
constexpr double kWorthImproving = 1.01;

const FoundOrders kNone{.orders = {}, .makespan = kNever, .num_scheduled = 0};

}  // namespace

BeamRounds::BeamRounds(const BoundProblem& problem,
                       const Instance& instance,
                       double bound,
                       FoundOrders known)
    : problem_(problem),
      instance_(instance),
      bound_(bound),
      known_(std::move(known)),
      best_(kNone),
      timer_(instance) {}

std::vector<FoundOrders> BeamRounds::run() {
  add_within_deadlines();
  const FoundOrders first = best_;
  if (known_.makespan < best_.makespan) best_ = known_;
  follow_best();
  if (best_.makespan > bound_ * kFar) {
    best_ = first;
    add_drawn_out();
    follow_best();
  }
  return std::move(found_);
}

void BeamRounds::add_within_deadlines() {
  const double end = bound_ * kEnd;
  const auto windows = start_windows(problem_, end, kDeadlineSteps);
  if (!windows) return;
  add({windows->latest_forward, windows->latest_backward}, kPullForward);
  add_from_end({windows->earliest_forward, windows->earliest_backward}, end, kPullFromEnd);
}

void BeamRounds::add_drawn_out() {
  const int few = instance_.num_microbatches / 2;
  if (few < kFewest * instance_.num_ranks()) return;
  BoundProblem problem = problem_;
  problem.num_microbatches = few;
  const Instance instance = instance_.with_microbatches(few);
  const double bound = lower_bound(problem).value;
  BeamRounds rounds(problem, instance, bound, kNone);
  const std::vector<FoundOrders> found = rounds.run();
  num_scheduled_ += rounds.num_scheduled();
  if (found.empty()) return;
  const FoundOrders& best =
      *std::min_element(found.begin(), found.end(), [](const FoundOrders& a, const FoundOrders& b) {
        return a.makespan < b.makespan;
      });
  OrderTimer timer(instance);
  timer.makespan(best.orders);
  const DueTimes due = due_times_of(best.orders, timer.starts(), instance);
  const double longer = (bound_ - bound) * kSlower;
  const DueTimes drawn_out_due = drawn_out(due, instance, instance_, longer);
  add(drawn_out_due, kPullForward);
  add_from_end(drawn_out_due, best.makespan + longer, kPullFromEnd);
}

void BeamRounds::follow_best() {
  const int64_t most = num_scheduled_ + kActions;
  double before = kNever;
  while (best_.makespan < before - kSameTime && num_scheduled_ < most) {
    before = best_.makespan;
    timer_.makespan(best_.orders);
    const DueTimes due = due_times_of(best_.orders, timer_.starts(), instance_);
    add(due, 1.0);
    add_from_end(due, before, 1.0);
  }
}

void BeamRounds::add(const DueTimes& due, double pull) {
  if (is_optimal()) return;
  BeamResult found = search_beam(instance_, due, beam(pull));
  num_scheduled_ += found.num_scheduled;
  if (found.orders) offer(std::move(*found.orders));
}

// With times for a schedule that ends at `end`.
void BeamRounds::add_from_end(const DueTimes& due, double end, double pull) {
  if (is_optimal() || instance_.split) return;
  const BeamResult found =
      search_beam(reversed(instance_), reversed(due, instance_, end), beam(pull));
  num_scheduled_ += found.num_scheduled;
  if (found.orders) offer(reversed(*found.orders));
}

void BeamRounds::offer(Orders orders) {
  const double makespan = timer_.makespan(orders);
  found_.push_back({.orders = std::move(orders), .makespan = makespan, .num_scheduled = 0});
  if (makespan < best_.makespan - kSameTime) best_ = found_.back();
}

BeamSearch BeamRounds::beam(double pull) const {
  const int64_t width = kActions / kBeams / static_cast<int64_t>(instance_.num_actions());
  return {.width = static_cast<size_t>(std::clamp<int64_t>(width, 1, kWidest)),
          .pull = pull,
          .give_up = std::min(known_.makespan, best_.makespan) * kWorthImproving};
}

}  // namespace megacore::pipeline
