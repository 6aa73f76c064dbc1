#include "megacore/pipeline/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <stdexcept>
#include <string>

#include "megacore/pipeline/bounds/critical_path.h"
#include "megacore/pipeline/schedules/generators.h"
#include "random_schedule.h"

namespace megacore::pipeline {
namespace {

// Times that no closed form hits by accident.
const Costs kUneven = {.forward = {3.0}, .backward_input = {4.0}, .backward_weight = {1.5}};

TEST(Simulate, AWholeBackwardCanHaveATimeOfItsOwn) {
  const Schedule whole = one_f_one_b({.num_ranks = 2, .num_microbatches = 3});
  EXPECT_DOUBLE_EQ(simulate(whole, kUneven, {5.0}).makespan, (3.0 + 5.0) * 4);
  EXPECT_DOUBLE_EQ(simulate(whole, kUneven, {5.0, 2.0}).busy[1], (3.0 + 2.0) * 3);
  EXPECT_THROW(simulate(whole, kUneven, {5.0, 2.0, 1.0}), std::invalid_argument);
}

TEST(Simulate, MatchesTheClosedFormsOfGpipeAndOneFOneB) {
  for (int p = 1; p <= 9; ++p) {
    for (int m = 1; m <= 20; ++m) {
      SCOPED_TRACE(testing::Message() << "p " << p << " m " << m);
      const PipelineShape shape{.num_ranks = p, .num_microbatches = m};
      const double work = (3.0 + 5.5) * m;
      const double bubble = (3.0 + 5.5) * (p - 1);
      for (const Schedule& schedule : {gpipe(shape), one_f_one_b(shape)}) {
        const Timeline timeline = simulate(schedule, kUneven);
        EXPECT_DOUBLE_EQ(timeline.makespan, work + bubble);
        EXPECT_NEAR(timeline.bubble_fraction, bubble / (work + bubble), 1e-12);
        for (const double busy : timeline.busy) EXPECT_DOUBLE_EQ(busy, work);
      }
      const Timeline gpipe_times = simulate(gpipe(shape), {});
      const Timeline times = simulate(one_f_one_b(shape), {});
      for (int rank = 0; rank < p; ++rank) {
        const auto r = static_cast<size_t>(rank);
        EXPECT_EQ(gpipe_times.peak_in_flight[r], m);
        EXPECT_EQ(times.peak_in_flight[r], std::min(p - rank, m));
      }
    }
  }
}

TEST(Simulate, MatchesTheClosedFormOfInterleaving) {
  for (const int p : {2, 3, 4, 8}) {
    for (const int v : {2, 3, 4}) {
      for (const int m : {p, 2 * p, 5 * p}) {
        SCOPED_TRACE(testing::Message() << "p " << p << " v " << v << " m " << m);
        const Schedule schedule =
            interleaved_one_f_one_b({.num_ranks = p, .num_chunks = v, .num_microbatches = m});
        const Timeline timeline = simulate(schedule, kUneven);
        EXPECT_DOUBLE_EQ(timeline.makespan, 8.5 * (v * m + p - 1));
        for (int rank = 0; rank < p; ++rank) {
          EXPECT_EQ(timeline.peak_in_flight[static_cast<size_t>(rank)],
                    std::min(2 * (p - 1 - rank) + (v - 1) * p + 1, v * m));
        }
      }
    }
  }
}

// Source for the latency terms: a message costs c between ranks; with p dividing m,
// GPipe pays 2c(p-1), 1F1B 2c(p-1)m/p + 2c(p-2), interleaved 1F1B 2c(pv-1).
TEST(Simulate, MessageLatencyMatchesTheClosedForms) {
  const double c = 0.1;
  const Costs costs = {
      .forward = {1.0}, .backward_input = {1.0}, .backward_weight = {1.0}, .send = c};
  for (const int p : {2, 4, 8}) {
    for (const int k : {1, 2, 4}) {
      const int m = k * p;
      SCOPED_TRACE(testing::Message() << "p " << p << " m " << m);
      const PipelineShape shape{.num_ranks = p, .num_microbatches = m};
      const double free = 3.0 * (m + p - 1);
      EXPECT_NEAR(simulate(gpipe(shape), costs).makespan, free + 2 * c * (p - 1), 1e-9);
      EXPECT_NEAR(simulate(one_f_one_b(shape), costs).makespan,
                  free + 2 * c * (p - 1) * k + 2 * c * (p - 2), 1e-9);
      for (const int v : {2, 4}) {
        const Schedule schedule =
            interleaved_one_f_one_b({.num_ranks = p, .num_chunks = v, .num_microbatches = m});
        EXPECT_NEAR(simulate(schedule, costs).makespan, 3.0 * (v * m + p - 1) + 2 * c * (p * v - 1),
                    1e-9);
      }
    }
  }
}

TEST(Simulate, TakesCostsPerStageAndFreesSplitBackwardsAtTheirWeightGradient) {
  const Schedule schedule = schedule_from_text(
      "rank 0: 0F0 0F1 0B0 0B1\n"
      "rank 1: 1F0 1I0 1F1 1I1 1W0 1W1\n");
  const Timeline timeline = simulate(schedule, {.forward = {1.0, 2.0},
                                                .backward_input = {1.0, 3.0},
                                                .backward_weight = {1.0, 4.0},
                                                .send = 0.5});
  // 1F0 waits for 0F0 (1) and its message: 1.5..3.5; 1I0 ..6.5; 1F1 ..8.5; 1I1 ..11.5; W ..19.5.
  EXPECT_DOUBLE_EQ(timeline.spans[4].start, 1.5);
  EXPECT_DOUBLE_EQ(timeline.spans[5].end, 6.5);
  EXPECT_DOUBLE_EQ(timeline.spans[2].start, 7.0);
  EXPECT_DOUBLE_EQ(timeline.makespan, 19.5);
  EXPECT_EQ(timeline.peak_in_flight, (std::vector<int64_t>{2, 2}));
}

TEST(Simulate, RefusesCostsThatMakeNoSense) {
  const Schedule schedule = gpipe({.num_ranks = 3, .num_microbatches = 2});
  EXPECT_THROW(simulate(schedule, {.forward = {1.0, 2.0}}), std::invalid_argument);
  EXPECT_THROW(simulate(schedule, {.forward = {-1.0}}), std::invalid_argument);
  EXPECT_THROW(simulate(schedule, {.forward = {}}), std::invalid_argument);
  Costs costs;
  costs.send = -1.0;
  EXPECT_THROW(simulate(schedule, costs), std::invalid_argument);
}

TEST(Simulate, NeverTakesZeroTimeForADivision) {
  const Schedule schedule = gpipe({.num_ranks = 2, .num_microbatches = 2});
  const Timeline timeline =
      simulate(schedule, {.forward = {0.0}, .backward_input = {0.0}, .backward_weight = {0.0}});
  EXPECT_EQ(timeline.bubble_fraction, 0.0);
}

std::string path_text(const Schedule& schedule, const Costs& costs) {
  const Timeline timeline = simulate(schedule, costs);
  std::string text;
  for (const int64_t index : critical_path(schedule, timeline)) {
    if (!text.empty()) text += ' ';
    append_text(schedule.actions[static_cast<size_t>(index)], text);
  }
  return text;
}

TEST(CriticalPath, FollowsTheSlowStage) {
  const Schedule schedule = one_f_one_b({.num_ranks = 2, .num_microbatches = 3});
  EXPECT_EQ(path_text(schedule, {}), "0F0 1F0 1B0 1F1 1B1 1F2 1B2 0B2");
  EXPECT_EQ(path_text(schedule, {.forward = {5.0, 1.0}}), "0F0 0F1 0B0 0F2 1F2 1B2 0B2");
}

TEST(Exposed, IsTheTimeMessagesCostAtOnce) {
  const Schedule schedule = gpipe({.num_ranks = 2, .num_microbatches = 2});
  EXPECT_EQ(simulate(schedule, {}).exposed, (std::vector<double>{0.0, 0.0}));
  // Rank 1 waits for the first message, rank 0 for the first gradient; the others are hidden.
  EXPECT_EQ(simulate(schedule, {.send = 0.5}).exposed, (std::vector<double>{0.5, 0.5}));
}

// On any schedule, with any costs: the path begins at 0 and ends at the makespan, its steps join
// without a gap but for messages, and what is exposed is idle time.
TEST(CriticalPath, JoinsBeginningAndEndOfRandomSchedules) {
  std::mt19937 random(29);
  for (int round = 0; round < 400; ++round) {
    Schedule schedule =
        random_schedule(random_placement(4, random),
                        std::uniform_int_distribution<int>(1, 4)(random), round % 2 == 0, random);
    if (round % 8 == 0) schedule = dualpipe_v({.num_ranks = 3, .num_microbatches = 6 + round % 3});
    std::uniform_int_distribution<int> eighths(0, 16);
    Costs costs{.send = eighths(random) / 16.0};
    for (auto* values : {&costs.forward, &costs.backward_input, &costs.backward_weight}) {
      values->assign(static_cast<size_t>(schedule.num_stages()), 0.0);
      for (double& value : *values) value = eighths(random) / 8.0;
    }
    const Timeline timeline = simulate(schedule, costs);
    const std::vector<int64_t> path = critical_path(schedule, timeline);
    const auto span = [&](size_t i) { return timeline.spans[static_cast<size_t>(path[i])]; };
    EXPECT_EQ(span(0).start, 0.0);
    EXPECT_EQ(span(path.size() - 1).end, timeline.makespan);
    for (size_t i = 1; i < path.size(); ++i) {
      const double gap = span(i).start - span(i - 1).end;
      EXPECT_TRUE(gap == 0.0 || gap == costs.send) << gap;
    }
    for (size_t rank = 0; rank < timeline.exposed.size(); ++rank) {
      EXPECT_GE(timeline.exposed[rank], 0.0);
      EXPECT_LE(timeline.exposed[rank], timeline.makespan - timeline.busy[rank] + 1e-9);
    }
  }
}

}  // namespace
}  // namespace megacore::pipeline
