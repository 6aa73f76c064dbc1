#include "search/beam_rounds.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "bounds/deadline_bound.h"
#include "search/reverse.h"

namespace megacore::pipeline {
namespace {

// Beams with the deadlines for an end this far above the bound, from one end of time or both.
struct Start {
  double end;
  std::optional<double> pull = {};
  std::optional<double> pull_from_end = {};
};

constexpr double kPull = 0.1;
constexpr double kPullFromEnd = 0.4;
constexpr Start kFirst{.end = 1.005, .pull = kPull, .pull_from_end = kPullFromEnd};
constexpr std::array<Start, 8> kMore = {{{.end = 1.002, .pull = {}, .pull_from_end = 0.2},
                                         {.end = 1.01, .pull = 0.2, .pull_from_end = {}},
                                         {.end = 1.01, .pull = {}, .pull_from_end = 0.2},
                                         {.end = 1.002, .pull = 0.4, .pull_from_end = {}},
                                         {.end = 1.002, .pull = {}, .pull_from_end = 0.1},
                                         {.end = 1.002, .pull = 0.1, .pull_from_end = {}},
                                         {.end = 1.01, .pull = {}, .pull_from_end = 0.1},
                                         {.end = 1.02, .pull = {}, .pull_from_end = 0.2}}};

// Actions that beams may schedule while they follow each other, and those with more starts. Beams
// are as wide as the first allow for a few of them.
constexpr size_t kActions = 1'000'000;
constexpr int64_t kActionsOfMore = 1'500'000;
constexpr int64_t kBeams = 7;
constexpr size_t kWidest = 100;
// So far above the bound it is worth going on.
constexpr double kFar = 1.005;
// A schedule for fewer microbatches is asked for if these are a few times the ranks. Its middle is
// drawn out, a little slower than the bound grows.
constexpr int kFewest = 2;
constexpr double kSlower = 1.03;
// What is slower than the best by less can become the best by local improvement.
constexpr double kWorthImproving = 1.01;

const FoundOrders kNoOrders{.orders = {}, .makespan = kNever, .num_scheduled = 0};

}  // namespace

BeamRounds::BeamRounds(const BoundProblem& problem,
                       const Instance& instance,
                       double bound,
                       FoundOrders known)
    : problem_(problem),
      instance_(instance),
      bound_(bound),
      known_(std::move(known)),
      best_(kNoOrders),
      timer_(instance) {}

std::vector<FoundOrders> BeamRounds::run() {
  run_few();
  run_more();
  return std::move(found_);
}

void BeamRounds::run_few() {
  start_at(kFirst.end, kFirst.pull, kFirst.pull_from_end);
  const FoundOrders first = best_;
  if (known_.makespan < best_.makespan) best_ = known_;
  follow_best({1.0});
  const int few = instance_.num_microbatches / 2;
  if (!is_far() || few < kFewest * instance_.num_ranks()) return;
  best_ = first;
  add_drawn_out(few);
  follow_best({1.0});
}

// Each start for itself, which narrow beams do not reward.
void BeamRounds::run_more() {
  if (beam(0.0).width < kWidest) return;
  const int64_t most = num_scheduled_ + kActionsOfMore;
  for (const Start& start : kMore) {
    if (!is_far() || num_scheduled_ >= most) return;
    best_ = kNoOrders;
    start_at(start.end, start.pull, start.pull_from_end);
    follow_best({1.0, 0.3});
  }
}

bool BeamRounds::is_far() const {
  double best = known_.makespan;
  for (const FoundOrders& found : found_) best = std::min(best, found.makespan);
  return best > bound_ * kFar;
}

// Guided by deadlines for an end `longer` times the bound.
void BeamRounds::start_at(double longer,
                          std::optional<double> pull,
                          std::optional<double> pull_from_end) {
  if (!pull && instance_.split) return;
  const double end = bound_ * longer;
  const auto windows = start_windows(problem_, end, kDeadlineSteps);
  if (!windows) return;
  if (pull) add({windows->latest_forward, windows->latest_backward}, *pull);
  if (pull_from_end) {
    add_from_end({windows->earliest_forward, windows->earliest_backward}, end, *pull_from_end);
  }
}

void BeamRounds::add_drawn_out(int few) {
  BoundProblem problem = problem_;
  problem.num_microbatches = few;
  const Instance instance = instance_.with_microbatches(few);
  const double bound = lower_bound(problem).value;
  BeamRounds rounds(problem, instance, bound, kNoOrders);
  rounds.run_few();
  num_scheduled_ += rounds.num_scheduled();
  const std::vector<FoundOrders>& found = rounds.found_;
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
  add(drawn_out_due, kPull);
  add_from_end(drawn_out_due, best.makespan + longer, kPullFromEnd);
}

void BeamRounds::follow_best(std::initializer_list<double> pulls) {
  const int64_t most = num_scheduled_ + static_cast<int64_t>(kActions);
  double before = kNever;
  while (best_.makespan < before - kSameTime && num_scheduled_ < most) {
    before = best_.makespan;
    timer_.makespan(best_.orders);
    const DueTimes due = due_times_of(best_.orders, timer_.starts(), instance_);
    for (const double pull : pulls) {
      add(due, pull);
      add_from_end(due, before, pull);
    }
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
  const size_t width = kActions / kBeams / instance_.num_actions();
  return {.width = std::clamp<size_t>(width, 1, kWidest),
          .pull = pull,
          .give_up = std::min(known_.makespan, best_.makespan) * kWorthImproving};
}

}  // namespace megacore::pipeline
