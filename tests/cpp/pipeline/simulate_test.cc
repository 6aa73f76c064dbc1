#include "megacore/pipeline/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "megacore/pipeline/generators.h"

namespace megacore::pipeline {
namespace {

// Times that no closed form hits by accident.
const Costs kUneven = {.forward = {3.0}, .backward_input = {4.0}, .backward_weight = {1.5}};

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
                  free + 2 * c * (p - 1) * k + 2 * c * (p - 2),
                  1e-9);
      for (const int v : {2, 4}) {
        const Schedule schedule =
            interleaved_one_f_one_b({.num_ranks = p, .num_chunks = v, .num_microbatches = m});
        EXPECT_NEAR(
            simulate(schedule, costs).makespan, 3.0 * (v * m + p - 1) + 2 * c * (p * v - 1), 1e-9);
      }
    }
  }
}

TEST(Simulate, TakesCostsPerStageAndFreesSplitBackwardsAtTheirWeightGradient) {
  const Schedule schedule = schedule_from_text(
      "rank 0: 0F0 0F1 0B0 0B1\n"
      "rank 1: 1F0 1I0 1F1 1I1 1W0 1W1\n");
  const Timeline timeline = simulate(schedule,
                                     {.forward = {1.0, 2.0},
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

}  // namespace
}  // namespace megacore::pipeline
