#include "search/beam_rounds.h"

#include <algorithm>
#include <utility>

#include "bounds/deadline_bound.h"

namespace megacore::pipeline {
namespace {

// What being late counts (BeamSearch::pull) with times that are only a guess, and with those of a
// schedule.
constexpr double kPull = 0.1;
constexpr double kPullOfBest = 1.0;
// The end, over the bound, whose deadlines guide the first beam.
constexpr double kFirstEnd = 1.005;
// Actions that beams may schedule while they follow each other. Beams are as wide as this allows
// for a few of them.
constexpr size_t kActions = 1'000'000;
constexpr int64_t kBeams = 7;
constexpr size_t kWidest = 100;
// So far above the bound it is worth going on.
constexpr double kFar = 1.005;
// A schedule for fewer microbatches is asked for if these are a few times the ranks. Its middle is
// drawn out, a little slower than the bound grows.
constexpr int kFewest = 2;
constexpr double kSlower = 1.03;
// What is slower than the best by less is still worth following.
constexpr double kWorthFollowing = 1.01;

}  // namespace

DueTimes due_times_of(const Orders& orders,
                      const std::vector<double>& starts,
                      const Instance& instance) {
  const size_t count = instance.at(instance.num_stages(), 0);
  DueTimes due{.forward = std::vector<double>(count), .backward = std::vector<double>(count)};
  std::vector<int> forwards(static_cast<size_t>(instance.num_stages()), 0);
  std::vector<int> backwards = forwards;
  for (size_t i = 0; i < orders.tokens.size(); ++i) {
    const auto [stage, part] = orders.tokens[i];
    const auto s = static_cast<size_t>(stage);
    if (part == Part::kForward) due.forward[instance.at(stage, forwards[s]++)] = starts[i];
    if (part == Part::kBackward) due.backward[instance.at(stage, backwards[s]++)] = starts[i];
  }
  return due;
}

DueTimes drawn_out(const DueTimes& due, const Instance& few, const Instance& more, double longer) {
  const int half = few.num_microbatches / 2;
  const int extra = more.num_microbatches - few.num_microbatches;
  const auto draw_out = [&](const std::vector<double>& from) {
    std::vector<double> to;
    for (int stage = 0; stage < more.num_stages(); ++stage) {
      for (int k = 0; k < more.num_microbatches; ++k) {
        const int passed = std::clamp(k - half, 0, extra);  // of the extra ones
        to.push_back(from[few.at(stage, k - passed)] + longer * passed / extra);
      }
    }
    return to;
  };
  return {.forward = draw_out(due.forward), .backward = draw_out(due.backward)};
}

BeamRounds::BeamRounds(const BoundProblem& problem,
                       const Instance& instance,
                       double bound,
                       FoundOrders known)
    : problem_(problem),
      instance_(instance),
      bound_(bound),
      known_(std::move(known)),
      timer_(instance) {}

std::vector<FoundOrders> BeamRounds::run() {
  follow_deadlines();
  const FoundOrders first = best_;
  if (known_.makespan < best_.makespan) best_ = known_;
  follow_best();
  const int few = instance_.num_microbatches / 2;
  if (is_far() && few >= kFewest * instance_.num_ranks()) {
    best_ = first;
    follow_half(few);
    follow_best();
  }
  return std::move(found_);
}

bool BeamRounds::is_far() const {
  double best = known_.makespan;
  for (const FoundOrders& found : found_) best = std::min(best, found.makespan);
  return best > bound_ * kFar;
}

void BeamRounds::follow_deadlines() {
  const auto windows = start_windows(problem_, bound_ * kFirstEnd, kDeadlineSteps);
  if (windows) add({windows->latest_forward, windows->latest_backward}, kPull);
}

void BeamRounds::follow_half(int few) {
  BoundProblem problem = problem_;
  problem.num_microbatches = few;
  const Instance instance = instance_.with_microbatches(few);
  const double bound = lower_bound(problem).value;
  BeamRounds rounds(problem, instance, bound, {});
  const std::vector<FoundOrders> found = rounds.run();
  num_scheduled_ += rounds.num_scheduled();
  if (found.empty()) return;
  const FoundOrders& best = *std::min_element(
      found.begin(), found.end(),
      [](const FoundOrders& a, const FoundOrders& b) { return a.makespan < b.makespan; });
  OrderTimer timer(instance);
  timer.makespan(best.orders);
  const DueTimes due = due_times_of(best.orders, timer.starts(), instance);
  add(drawn_out(due, instance, instance_, (bound_ - bound) * kSlower), kPull);
}

void BeamRounds::follow_best() {
  const int64_t most = num_scheduled_ + static_cast<int64_t>(kActions);
  double before = kNever;
  while (best_.makespan < before - kSameTime && num_scheduled_ < most) {
    before = best_.makespan;
    timer_.makespan(best_.orders);
    add(due_times_of(best_.orders, timer_.starts(), instance_), kPullOfBest);
  }
}

void BeamRounds::add(const DueTimes& due, double pull) {
  if (is_optimal()) return;
  const size_t width = kActions / kBeams / instance_.num_actions();
  BeamResult found =
      search_beam(instance_, due,
                  {.width = std::clamp<size_t>(width, 1, kWidest),
                   .pull = pull,
                   .give_up = std::min(known_.makespan, best_.makespan) * kWorthFollowing});
  num_scheduled_ += found.num_scheduled;
  if (!found.orders) return;
  const double makespan = timer_.makespan(*found.orders);
  found_.push_back({std::move(*found.orders), makespan});
  if (makespan < best_.makespan - kSameTime) best_ = found_.back();
}

}  // namespace megacore::pipeline
