#include "megacore/pipeline/bounds/lower_bound.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

#include "megacore/pipeline/schedules/schedule_catalog.h"
#include "random_schedule.h"
#include "schedule_checks.h"

namespace megacore::pipeline {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double bound_of(Placement placement, int m, bool split, int64_t limit, double send = 0.0) {
  return lower_bound({.placement = std::move(placement),
                      .num_microbatches = m,
                      .costs = {.send = send},
                      .split_backward = split,
                      .memory_limit = {limit}})
      .value;
}

Costs random_costs(int num_stages, std::mt19937& random) {
  std::uniform_int_distribution<int> eighths(0, 24);
  const auto list = [&] {
    std::vector<double> values(static_cast<size_t>(num_stages));
    for (double& value : values) value = eighths(random) / 8.0;
    return values;
  };
  return {.forward = list(),
          .backward_input = list(),
          .backward_weight = list(),
          .send = eighths(random) / 16.0};
}

TEST(LowerBound, IsMetByTheBestPublishedSchedulesWhenMessagesAreFree) {
  for (const int p : {2, 3, 4, 8, 16}) {
    for (const int m : {p, 2 * p, 4 * p, 4 * p + 3}) {
      SCOPED_TRACE(testing::Message() << "p " << p << " m " << m);
      const PipelineShape shape{.num_ranks = p, .num_microbatches = m};
      std::vector<Schedule> schedules = {gpipe(shape), one_f_one_b(shape), zb_h1(shape),
                                         zb_h2(shape)};
      for (const int chunks : {2, 3}) {
        schedules.push_back(
            interleaved_one_f_one_b({.num_ranks = p, .num_chunks = chunks, .num_microbatches = m}));
        schedules.push_back(
            looped_bfs({.num_ranks = p, .num_chunks = chunks, .num_microbatches = m}));
        schedules.push_back(
            interleaved_zero_bubble({.num_ranks = p, .num_chunks = chunks, .num_microbatches = m}));
      }
      if (m >= 2 * p - 1) schedules.push_back(zb_v(shape));
      for (const Schedule& schedule : schedules) {
        EXPECT_EQ(lower_bound(problem_of(schedule, {})).value, simulate(schedule, {}).makespan)
            << schedule.name;
      }
    }
  }
}

// The published table of bounds for m = 4p, F = I = W = 1; send cost 0 and 0.1.
TEST(LowerBound, ReproducesThePublishedTable) {
  struct Row {
    Placement (*placement)(int);
    bool split;
    int (*limit)(int);
    double free[3];  // p = 4, 8, 16
    double sent[3];
  };
  const Row rows[] = {
      {chain, true, [](int p) { return p; }, {51, 103, 207}, {51.6, 104.4, 210.8}},
      {chain, true, [](int p) { return 2 * p; }, {51, 103, 207}, {51.3, 103.7, 208.5}},
      {chain, false, [](int p) { return p; }, {57, 117, 237}, {59.4, 122.6, 249}},
      {two_chunks, true, [](int p) { return 2 * p; }, {99, 199, 399}, {100, 201.2, 403.6}},
      {two_chunks, false, [](int p) { return 3 * p; }, {105, 213, 429}, {105.6, 214.4, 432}},
      {v, true, [](int p) { return 2 * p; }, {99, 199, 399}, {99.9, 201.1, 403.5}},
      {v, true, [](int p) { return 2 * ((p + 2) / 2); }, {101, 205, 414}, {101.9, 207.1, 419.8}},
      {v, true, [](int p) { return 2 * ((p + 4) / 3); }, {104, 208, 426}, {104.9, 210.6, 445}},
  };
  const int ranks[] = {4, 8, 16};
  for (size_t row = 0; row < std::size(rows); ++row) {
    for (size_t i = 0; i < 3; ++i) {
      SCOPED_TRACE(testing::Message() << "row " << row << " p " << ranks[i]);
      const int p = ranks[i];
      const auto value = [&](double send) {
        return bound_of(rows[row].placement(p), 4 * p, rows[row].split, rows[row].limit(p), send);
      };
      EXPECT_NEAR(value(0.0), rows[row].free[i], 1e-9);
      EXPECT_NEAR(value(0.1), rows[row].sent[i], 1e-9);
    }
  }
}

// Optima of small instances, proved by a constraint solver elsewhere; the last column says whether
// the bound finds them.
TEST(LowerBound, IsNeverAboveTheKnownOptima) {
  struct Instance {
    Placement (*placement)(int);
    int p, m, limit;
    bool split;
    double send, optimum;
    bool tight;
  };
  for (const Instance& i :
       {Instance{chain, 4, 8, 4, false, 0.1, 34.6, false},
        Instance{chain, 4, 8, 4, true, 0.1, 28.2, false},
        Instance{chain, 4, 16, 4, false, 0.1, 59.8, false},
        Instance{chain, 4, 16, 4, true, 0.1, 52.2, false},
        Instance{chain, 8, 16, 8, false, 0.1, 73.0, false},
        Instance{chain, 8, 16, 8, true, 0.1, 57.8, false},
        Instance{chain, 16, 16, 16, true, 0.1, 66.0, true},
        Instance{two_chunks, 4, 8, 11, false, 0.1, 57.6, true},
        Instance{two_chunks, 4, 4, 8, true, 0.1, 28.0, true},
        Instance{two_chunks, 4, 8, 8, true, 0.1, 52.0, true},
        Instance{v, 4, 4, 6, true, 0.0, 29.0, true}, Instance{v, 4, 4, 6, true, 0.1, 30.8, false},
        Instance{v, 4, 4, 4, true, 0.0, 35.0, false}, Instance{v, 4, 8, 6, true, 0.0, 53.0, true},
        Instance{v, 4, 8, 4, true, 0.0, 59.0, false}, Instance{v, 4, 8, 8, true, 0.1, 51.9, true},
        Instance{v, 8, 8, 16, true, 0.1, 57.1, true}, Instance{v, 8, 8, 10, true, 0.0, 65.0, false},
        Instance{v, 8, 8, 8, true, 0.0, 71.0, false}}) {
    SCOPED_TRACE(testing::Message() << "p " << i.p << " m " << i.m << " limit " << i.limit);
    const double bound = bound_of(i.placement(i.p), i.m, i.split, i.limit, i.send);
    EXPECT_LE(bound, i.optimum + 1e-9);
    EXPECT_EQ(bound > i.optimum - 1e-9, i.tight) << bound;
  }
}

TEST(LowerBound, HoldsForEveryGeneratorAndAnyCosts) {
  std::mt19937 random(11);
  for (const ScheduleInfo& info : schedule_catalog()) {
    for (int trial = 0; trial < 40; ++trial) {
      ScheduleRequest request{.num_ranks = 2 * std::uniform_int_distribution<int>(1, 4)(random),
                              .num_microbatches = 0};
      if (info.name == "no_pipelining") request.num_ranks = 1;
      request.num_microbatches =
          2 * request.num_ranks + 2 * std::uniform_int_distribution<int>(0, 5)(random);
      if (info.num_chunks == 0)
        request.num_chunks = std::uniform_int_distribution<int>(1, 3)(random);
      const Schedule schedule = build_schedule(info.name, request);
      const Costs costs = random_costs(schedule.num_stages(), random);
      SCOPED_TRACE(testing::Message() << info.name << " p " << request.num_ranks << " m "
                                      << request.num_microbatches << " trial " << trial);
      const double makespan = simulate(schedule, costs).makespan;
      const LowerBound bound = lower_bound(problem_of(schedule, costs));
      ASSERT_LE(bound.value, makespan + 1e-9) << to_text(bound.reason);
      EXPECT_EQ(bound.value, *std::max_element(bound.by_reason.begin(), bound.by_reason.end()));
      EXPECT_EQ(bound.value, bound.by_reason[static_cast<size_t>(bound.reason)]);
    }
  }
}

TEST(LowerBound, HoldsForRandomSchedulesOnRandomPlacements) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 3000; ++trial) {
    SCOPED_TRACE(trial);
    const int p = std::uniform_int_distribution<int>(1, 4)(random);
    const int num_stages = std::uniform_int_distribution<int>(p, 3 * p)(random);
    std::vector<int32_t> ranks(static_cast<size_t>(num_stages));
    std::iota(ranks.begin(), ranks.end(), 0);
    for (int32_t& rank : ranks) {
      if (rank >= p) rank = std::uniform_int_distribution<int32_t>(0, p - 1)(random);
    }
    std::shuffle(ranks.begin(), ranks.end(), random);
    const bool split = std::bernoulli_distribution(0.5)(random);
    const int m = std::uniform_int_distribution<int>(1, 4)(random);
    const Schedule schedule = random_schedule(Placement(ranks), m, split, random);
    ASSERT_NO_THROW(validate(schedule));
    const Costs costs = random_costs(num_stages, random);
    const Timeline timeline = simulate(schedule, costs);
    const LowerBound bound = lower_bound({.placement = schedule.placement,
                                          .num_microbatches = m,
                                          .costs = costs,
                                          .split_backward = split,
                                          .memory_limit = timeline.peak_in_flight});
    ASSERT_LE(bound.value, timeline.makespan + 1e-9) << to_text(bound.reason);
  }
}

// The best of many random schedules of a tiny instance is as fast as the bound says: the bound is
// not just small.
TEST(LowerBound, IsReachedOnTinyInstances) {
  std::mt19937 random(3);
  for (const bool split : {false, true}) {
    for (const Placement& placement : {chain(2), v(2), two_chunks(2)}) {
      double best = kInfinity;
      for (int trial = 0; trial < 4000; ++trial) {
        best = std::min(best, simulate(random_schedule(placement, 2, split, random), {}).makespan);
      }
      const LowerBound bound =
          lower_bound({.placement = placement, .num_microbatches = 2, .split_backward = split});
      EXPECT_EQ(bound.value, best) << placement.num_stages() << split;
    }
  }
}

TEST(LowerBound, GrowsWhenMemoryShrinks) {
  for (const auto& placement : {chain(6), v(6), two_chunks(6)}) {
    for (const bool split : {false, true}) {
      double previous = lower_bound({.placement = placement,
                                     .num_microbatches = 18,
                                     .costs = {.send = 0.25},
                                     .split_backward = split})
                            .value;
      for (int64_t limit = 20; limit >= 1; --limit) {
        const double value = bound_of(placement, 18, split, limit, 0.25);
        EXPECT_GE(value, previous) << limit;
        previous = value;
      }
    }
  }
}

TEST(LowerBound, SaysWhichBoundBinds) {
  const auto reason = [](const BoundProblem& problem) { return lower_bound(problem).reason; };
  EXPECT_EQ(reason({.placement = chain(4), .num_microbatches = 1}), BoundReason::kCriticalPath);
  EXPECT_EQ(reason({.placement = chain(4), .num_microbatches = 8}), BoundReason::kRankWork);
  EXPECT_EQ(
      reason(
          {.placement = v(4), .num_microbatches = 16, .costs = {.send = 0.1}, .memory_limit = {8}}),
      BoundReason::kRankQueue);
  EXPECT_EQ(reason({.placement = v(4), .num_microbatches = 16, .memory_limit = {4}}),
            BoundReason::kDelivery);
  // One activation at a time: every microbatch goes all the way before the next one enters rank 0.
  const LowerBound serial =
      lower_bound({.placement = chain(4), .num_microbatches = 16, .memory_limit = {1}});
  EXPECT_EQ(serial.value, 16 * 9);
  EXPECT_EQ(
      lower_bound(
          {.placement = v(4), .num_microbatches = 64, .costs = {.send = 3.0}, .memory_limit = {4}})
          .reason,
      BoundReason::kMemoryArea);
}

TEST(LowerBound, RefusesWhatMakesNoSense) {
  const auto refusal = [](const BoundProblem& problem) {
    return message_of([&] { lower_bound(problem); });
  };
  EXPECT_NE(refusal({.placement = chain(2), .num_microbatches = 0})
                .find("num_microbatches must be at least 1, got 0"),
            std::string::npos);
  EXPECT_NE(refusal({.placement = chain(3), .num_microbatches = 2, .memory_limit = {1, 2}})
                .find("memory_limit has 2 entries; give one for all ranks or 3"),
            std::string::npos);
  EXPECT_NE(message_of([] {
              problem_of(forward_only(gpipe({.num_ranks = 2, .num_microbatches = 2})), {});
            }).find("is forward-only; the bounds are for training"),
            std::string::npos);
  EXPECT_NE(refusal({.placement = chain(3), .num_microbatches = 2, .memory_limit = {0}})
                .find("a rank needs room for 1 activation"),
            std::string::npos);
  EXPECT_NE(refusal({.placement = chain(3), .num_microbatches = 2, .costs = {.overlap = 0.5}})
                .find("hold without overlap"),
            std::string::npos);
  EXPECT_NE(
      refusal({.placement = chain(3), .num_microbatches = 2, .costs = {.forward = {1.0, 2.0}}})
          .find("cost 'forward' has 2 entries"),
      std::string::npos);
}

}  // namespace
}  // namespace megacore::pipeline
