// Loops of two chunks with messages and room for p microbatches, where no short pattern is good
// and the beam search pays.

#include <gtest/gtest.h>

#include <algorithm>

#include "megacore/pipeline/search/auto_schedule.h"
#include "schedule_checks.h"
#include "search/beam_rounds.h"

namespace megacore::pipeline {
namespace {

void expect_sound(const AutoSchedule& result, const BoundProblem& problem) {
  const Certificate& certificate = result.certificate;
  const Timeline timeline = checked(result.schedule, problem.costs);
  EXPECT_NEAR(timeline.makespan, certificate.makespan, 1e-9);
  EXPECT_GE(certificate.makespan, certificate.bound.value - 1e-9);
  for (const NamedResult& named : certificate.named) {
    EXPECT_LE(certificate.makespan, named.makespan + 1e-9) << named.name;
  }
  for (size_t rank = 0; rank < certificate.peak_memory.size(); ++rank) {
    const size_t at = problem.memory_limit.size() == 1 ? 0 : rank;
    EXPECT_LE(certificate.peak_memory[rank], problem.memory_limit[at]) << rank;
  }
}

TEST(AutoBeam, FillsLoopsInTheMemoryOf1F1B) {
  const BoundProblem problem{.placement = two_chunks(8),
                             .num_microbatches = 16,
                             .costs = {.send = 0.1},
                             .split_backward = false,
                             .memory_limit = {16}};
  const AutoSchedule result = auto_schedule(problem, Effort::kThorough);
  expect_sound(result, problem);
  EXPECT_NEAR(result.certificate.bound.value, 121.6, 0.01);
  EXPECT_NEAR(result.certificate.makespan, 123.2, 1e-9);
  EXPECT_TRUE(result.certificate.winner.starts_with("beam")) << result.certificate.winner;
}

TEST(AutoBeam, LearnsFromHalfAsManyMicrobatches) {
  const BoundProblem problem{.placement = Placement::v({.num_ranks = 16}),
                             .num_microbatches = 64,
                             .split_backward = false,
                             .memory_limit = {64}};
  const Instance instance = make_instance(problem);
  const double bound = lower_bound(problem).value;
  BeamRounds rounds(problem, instance, bound, {});
  const std::vector<FoundOrders> found = rounds.run();
  ASSERT_FALSE(found.empty());
  double best = kNever;
  OrderTimer timer(instance);
  for (const FoundOrders& orders : found) {
    EXPECT_TRUE(fits_memory(orders.orders, instance));
    EXPECT_EQ(timer.makespan(orders.orders), orders.makespan);
    best = std::min(best, orders.makespan);
  }
  EXPECT_NEAR(best, 431.0, 1e-9);  // from deadlines alone: 433
  EXPECT_GT(rounds.num_scheduled(), 0);
}

TEST(AutoBeam, DrawsOutTheMiddle) {
  const BoundProblem problem{
      .placement = two_chunks(2), .num_microbatches = 4, .split_backward = false};
  const Instance few = make_instance(problem);
  const Instance more = few.with_microbatches(7);
  DueTimes due;
  for (int i = 0; i < 16; ++i) {
    due.forward.push_back(10.0 * i);
    due.backward.push_back(10.0 * i + 1.0);
  }
  const DueTimes longer = drawn_out(due, few, more, 60.0);
  ASSERT_EQ(longer.forward.size(), 28U);
  const std::vector<double> expected = {40, 50, 60, 80, 100, 120, 130};  // of the second stage
  for (int k = 0; k < 7; ++k) {
    const size_t at = more.at(1, k);
    EXPECT_EQ(longer.forward[at], expected[static_cast<size_t>(k)]) << k;
    EXPECT_EQ(longer.backward[at], expected[static_cast<size_t>(k)] + 1.0) << k;
  }
}

// Too large for the exact search, far from their bounds: the beam runs on all of them.
TEST(AutoBeam, TakesEveryKindOfProblemAndRepeatsItself) {
  const std::vector<BoundProblem> problems = {
      {.placement = two_chunks(3),
       .num_microbatches = 20,
       .costs = {.forward = {1.0, 0.5, 0.0, 2.0, 1.0, 1.5}, .send = 0.3},
       .split_backward = false,
       .memory_limit = {12, 10, 9},
       .activation_size = {1, 2, 1, 3, 1, 2}},
      {.placement = Placement::v({.num_ranks = 4}),
       .num_microbatches = 12,
       .costs = {.send = 0.2},
       .split_backward = true,
       .memory_limit = {5}},
      {.placement = Placement::v({.num_ranks = 3}),
       .num_microbatches = 24,
       .costs = {.backward_weight = {0.0}, .send = 0.7},
       .split_backward = true,
       .memory_limit = {2}},
      {.placement = Placement::loop({.num_ranks = 3, .num_chunks = 3}),
       .num_microbatches = 14,
       .costs = {.send = 0.4},
       .split_backward = false,
       .memory_limit = {7}}};
  for (size_t i = 0; i < problems.size(); ++i) {
    SCOPED_TRACE(i);
    const AutoSchedule result = auto_schedule(problems[i], Effort::kThorough);
    expect_sound(result, problems[i]);
    const AutoSchedule again = auto_schedule(problems[i], Effort::kThorough);
    EXPECT_EQ(again.schedule, result.schedule);
    EXPECT_EQ(again.certificate.winner, result.certificate.winner);
    EXPECT_EQ(again.certificate.num_scheduled, result.certificate.num_scheduled);
    const AutoSchedule fast = auto_schedule(problems[i], Effort::kFast);
    EXPECT_LE(result.certificate.makespan, fast.certificate.makespan + 1e-9);
  }
}

}  // namespace
}  // namespace megacore::pipeline
