#include "search/contest.h"

#include <algorithm>
#include <utility>

#include "search/justify.h"
#include "search/order_search.h"

namespace megacore::pipeline {
namespace {

constexpr size_t kMost = 64;
constexpr int kRounds = 4;
// Justification places so many actions for one that is timed, as it takes longer.
constexpr int64_t kJustified = 3;
constexpr const char* kSuffix = " + local_search";

void sort_by_makespan(std::vector<Solution>& solutions) {
  std::stable_sort(solutions.begin(), solutions.end(), [](const Solution& a, const Solution& b) {
    return a.makespan < b.makespan;
  });
}

}  // namespace

void Contestants::add(const Solution& solution) {
  solutions_.push_back(solution);
  if (solutions_.size() >= 2 * kMost) shrink();
}

std::vector<Solution> Contestants::take() && {
  shrink();
  return std::move(solutions_);
}

void Contestants::shrink() {
  sort_by_makespan(solutions_);
  std::vector<Solution> kept;
  for (Solution& solution : solutions_) {
    const bool known = std::any_of(kept.begin(), kept.end(), [&](const Solution& other) {
      return other.orders == solution.orders;
    });
    if (!known) kept.push_back(std::move(solution));
    if (kept.size() == kMost) break;
  }
  solutions_ = std::move(kept);
}

ContestResult improve_best(OrderTimer& timer,
                           const Instance& instance,
                           std::vector<Solution> solutions,
                           const Contest& contest) {
  int64_t num_scheduled = 0;
  const bool justifies = fits_always(instance);
  const auto improve = [&](Solution& solution, const auto& method, const OrderSearch& search) {
    FoundOrders found = method(timer, instance, std::move(solution.orders), search);
    num_scheduled += found.num_scheduled;
    const bool named = solution.winner.ends_with(kSuffix);
    if (found.makespan < solution.makespan - kSameTime && !named) solution.winner += kSuffix;
    solution.orders = std::move(found.orders);
    solution.makespan = found.makespan;
    return solution.makespan <= contest.target + kSameTime;
  };
  for (uint64_t round = 1; round <= kRounds; ++round) {
    const int64_t share = contest.max_actions / kRounds / static_cast<int64_t>(solutions.size());
    // Memory leaves little room to move all at once.
    const int64_t moved = share * (justifies ? 1 : 4) / 4;
    const OrderSearch all{
        .target = contest.target, .max_actions = (share - moved) / kJustified, .seed = round};
    const OrderSearch one{.target = contest.target, .max_actions = moved, .seed = round};
    for (Solution& solution : solutions) {
      const bool done = (justifies && improve(solution, justify_orders, all)) ||
                        improve(solution, search_orders, one);
      if (done) return {std::move(solution), num_scheduled};
    }
    sort_by_makespan(solutions);
    if (round < kRounds) solutions.resize((solutions.size() + 3) / 4);
  }
  return {std::move(solutions.front()), num_scheduled};
}

}  // namespace megacore::pipeline
