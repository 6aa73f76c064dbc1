// tightened() against an oracle that tries all orders, and where it is known to be exact.

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "megacore/pipeline/bounds/lower_bound.h"
#include "megacore/pipeline/schedules/generators.h"
#include "random_schedule.h"
#include "schedule_checks.h"

namespace megacore::pipeline {
namespace {

double tight_bound(const BoundProblem& problem, double makespan) {
  return tightened(lower_bound(problem), problem, makespan).value;
}

// Smallest makespan of all orders of a tiny problem with a cost per stage: tries every action that
// could be the next one of its rank, and forgets what it has seen in the same state.
class Oracle {
 public:
  explicit Oracle(const BoundProblem& problem)
      : problem_(problem),
        num_stages_(problem.placement.num_stages()),
        done_(at(num_stages_) * 3, 0),
        free_at_(at(problem.placement.num_ranks()), 0.0),
        held_(free_at_.size(), 0),
        ends_(done_.size()) {}

  double best() {
    descend();
    return best_;
  }

 private:
  static size_t at(int i) { return static_cast<size_t>(i); }
  int parts() const { return problem_.split_backward ? 3 : 2; }
  double duration(int stage, int part) const {
    const Costs& costs = problem_.costs;
    if (part == 0) return costs.forward[at(stage)];
    if (part == 2) return costs.backward_weight[at(stage)];
    const double weight = problem_.split_backward ? 0.0 : costs.backward_weight[at(stage)];
    return costs.backward_input[at(stage)] + weight;
  }
  // End of action k of a stage plus the message to another, or infinity.
  double arrival(int from, int to, int part, int k) const {
    const std::vector<double>& ends = ends_[at(from * 3 + part)];
    if (at(k) >= ends.size()) return std::numeric_limits<double>::infinity();
    const bool same = problem_.placement.rank_of(from) == problem_.placement.rank_of(to);
    return ends[at(k)] + (same ? 0.0 : problem_.costs.send);
  }
  double ready(int stage, int part) const {
    const int k = done_[at(stage * 3 + part)];
    if (part == 0) return stage == 0 ? 0.0 : arrival(stage - 1, stage, 0, k);
    if (part == 2) return arrival(stage, stage, 1, k);
    return stage + 1 == num_stages_ ? arrival(stage, stage, 0, k) : arrival(stage + 1, stage, 1, k);
  }

  void descend() {
    std::vector<double> state(free_at_);
    for (const auto& ends : ends_) state.insert(state.end(), ends.begin(), ends.end());
    if (!seen_.emplace(std::pair(done_, std::move(state)), true).second) return;
    bool over = true;
    for (int stage = 0; stage < num_stages_; ++stage) {
      for (int part = 0; part < parts(); ++part) {
        const size_t lane = at(stage * 3 + part);
        if (done_[lane] == problem_.num_microbatches) continue;
        over = false;
        const size_t rank = at(problem_.placement.rank_of(stage));
        if (part == 0 && held_[rank] == problem_.memory_limit[rank]) continue;
        const double start = std::max(ready(stage, part), free_at_[rank]);
        const double end = start + duration(stage, part);
        if (end >= best_) continue;
        const int holds = part == 0 ? 1 : part + 1 == parts() ? -1 : 0;
        const double before = std::exchange(free_at_[rank], end);
        ends_[lane].push_back(end);
        ++done_[lane];
        held_[rank] += holds;
        descend();
        held_[rank] -= holds;
        --done_[lane];
        ends_[lane].pop_back();
        free_at_[rank] = before;
      }
    }
    if (over) best_ = std::min(best_, *std::max_element(free_at_.begin(), free_at_.end()));
  }

  const BoundProblem& problem_;
  int num_stages_;
  std::vector<int> done_;  // [stage * 3 + part]
  std::vector<double> free_at_;
  std::vector<int64_t> held_;
  std::vector<std::vector<double>> ends_;
  std::map<std::pair<std::vector<int>, std::vector<double>>, bool> seen_;
  double best_ = std::numeric_limits<double>::infinity();
};

BoundProblem random_problem(std::mt19937& random) {
  const auto below = [&](int n) { return std::uniform_int_distribution<int>(0, n - 1)(random); };
  const bool split = below(2) == 0;
  const std::vector<Placement> placements = {chain(2), chain(3), Placement::v({.num_ranks = 2}),
                                             Placement({0, 1, 0})};
  const Placement& placement = placements[static_cast<size_t>(below(4))];
  const int num_stages = placement.num_stages();
  const int m = (split ? 18 : 20) / (num_stages * (split ? 3 : 2));
  const auto list = [&] {
    std::vector<double> values(static_cast<size_t>(num_stages));
    for (double& value : values) value = below(5) / 2.0;
    return values;
  };
  std::vector<int64_t> limits;
  for (int rank = 0; rank < placement.num_ranks(); ++rank) {
    limits.push_back(static_cast<int64_t>(placement.stages_of(rank).size()) + below(3));
  }
  return {.placement = placement,
          .num_microbatches = m,
          .costs = {.forward = list(),
                    .backward_input = list(),
                    .backward_weight = list(),
                    .send = below(5) / 4.0},
          .split_backward = split,
          .memory_limit = limits};
}

TEST(DeadlineBound, IsNeverAboveTheFastestOfAllOrders) {
  std::mt19937 random(11);
  int num_raised = 0;
  for (int trial = 0; trial < 200; ++trial) {
    const BoundProblem problem = random_problem(random);
    const double best = Oracle(problem).best();
    const double before = lower_bound(problem).value;
    for (const double makespan : {best, 1.5 * best + 1.0}) {
      const double bound = tight_bound(problem, makespan);
      ASSERT_LE(bound, best + 1e-6) << "trial " << trial;
      ASSERT_GE(bound, before);
      num_raised += bound > before + 1e-6 ? 1 : 0;
    }
  }
  EXPECT_GT(num_raised, 40);
}

TEST(DeadlineBound, IsNeverAboveARandomSchedule) {
  std::mt19937 random(12);
  for (int trial = 0; trial < 200; ++trial) {
    const bool split = std::bernoulli_distribution(0.5)(random);
    const Placement placement = random_placement(5, random);
    const int m = std::uniform_int_distribution<int>(1, 7)(random);
    const Schedule schedule = random_schedule(placement, m, split, random);
    const Costs costs{.send = std::uniform_int_distribution<int>(0, 8)(random) / 8.0};
    const BoundProblem problem = problem_of(schedule, costs);
    const double makespan = simulate(schedule, costs).makespan;
    ASSERT_LE(tight_bound(problem, makespan), makespan + 1e-6);
    ASSERT_LE(tight_bound(problem, 1.2 * makespan), makespan + 1e-6);
  }
}

// One stage per rank and the memory of 1F1B: 1F1B and ZB-H1 are optimal, also when messages take
// time.
TEST(DeadlineBound, ProvesThatThePublishedSchedulesOfAChainAreOptimal) {
  for (const int p : {2, 3, 4, 8}) {
    for (const int m : {2 * p, 3 * p, 4 * p}) {
      for (const double send : {0.0, 0.05, 0.1}) {
        SCOPED_TRACE(testing::Message() << "p " << p << " m " << m << " send " << send);
        const PipelineShape shape{.num_ranks = p, .num_microbatches = m};
        for (const Schedule& schedule : {one_f_one_b(shape), zb_h1(shape)}) {
          BoundProblem problem = problem_of(schedule, {.send = send});
          problem.memory_limit = {p};
          const double makespan = simulate(schedule, {.send = send}).makespan;
          EXPECT_NEAR(tight_bound(problem, makespan), makespan, 1e-9) << schedule.name;
        }
      }
    }
  }
}

TEST(DeadlineBound, SaysThatItBinds) {
  const BoundProblem problem{
      .placement = chain(4), .num_microbatches = 16, .costs = {.send = 0.1}, .memory_limit = {4}};
  const LowerBound before = lower_bound(problem);
  const LowerBound bound = tightened(before, problem, 52.2);
  EXPECT_NEAR(before.value, 51.6, 1e-9);
  EXPECT_NEAR(bound.value, 52.2, 1e-9);
  EXPECT_EQ(bound.reason, BoundReason::kDeadlines);
  EXPECT_EQ(name_of(bound.reason), "deadlines");
  EXPECT_EQ(bound.by_reason[static_cast<size_t>(BoundReason::kDeadlines)], bound.value);
  // Nothing to prove, or two chains: the bound as it was.
  EXPECT_EQ(tightened(before, problem, before.value).value, before.value);
  const BoundProblem both{.placement = Placement::bidirectional({.num_ranks = 2}),
                          .num_microbatches = 4};
  EXPECT_EQ(tightened(lower_bound(both), both, 100.0).value, lower_bound(both).value);
}

}  // namespace
}  // namespace megacore::pipeline
