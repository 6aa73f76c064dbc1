// Loop placement: zero-bubble, interleaved and breadth-first orders.

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "megacore/pipeline/schedules/generators.h"
#include "schedule_checks.h"

namespace megacore::pipeline {
namespace {

constexpr int kRanks[] = {1, 2, 3, 4, 5, 8};

std::vector<int> microbatches_for(int p) { return {1, 2, p, p + 1, 2 * p - 1, 2 * p, 4 * p}; }

TEST(NoPipelining, RunsOneMicrobatchAfterTheOther) {
  const Schedule schedule = no_pipelining({.num_ranks = 1, .num_chunks = 2, .num_microbatches = 2});
  EXPECT_EQ(row(schedule, 0), "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1");
  EXPECT_EQ(peak_of(checked(schedule)), 2);
  EXPECT_NE(message_of([] {
              no_pipelining({.num_ranks = 2, .num_chunks = 1, .num_microbatches = 2});
            }).find("num_ranks is 2; no_pipelining runs on 1 rank"),
            std::string::npos);
}

TEST(ZbH1, IsOneFOneBWithTheWeightGradientsOfRankRLateByR) {
  const Schedule schedule = zb_h1({.num_ranks = 3, .num_microbatches = 4});
  EXPECT_EQ(row(schedule, 0), "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3");
  EXPECT_EQ(row(schedule, 1), "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3");
  EXPECT_EQ(row(schedule, 2), "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3");
}

TEST(ZbH1, HasAThirdOfTheBubbleOfOneFOneBAndItsMemory) {
  for (const int p : kRanks) {
    for (const int m : microbatches_for(p)) {
      SCOPED_TRACE(testing::Message() << "p " << p << " m " << m);
      const Timeline timeline = checked(zb_h1({.num_ranks = p, .num_microbatches = m}));
      EXPECT_EQ(timeline.makespan, m >= p ? 3 * m + p - 1 : 2 * m + 2 * p - 1);
      for (const int64_t peak : timeline.peak_in_flight) EXPECT_EQ(peak, std::min(p, m));
    }
  }
}

TEST(ZbH2, RunsWithoutAWaitInEveryRank) {
  const Schedule schedule = zb_h2({.num_ranks = 2, .num_microbatches = 4});
  EXPECT_EQ(row(schedule, 0), "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3");
  EXPECT_EQ(row(schedule, 1), "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3");
  for (const int p : kRanks) {
    for (const int m : microbatches_for(p)) {
      SCOPED_TRACE(testing::Message() << "p " << p << " m " << m);
      const Schedule zb = zb_h2({.num_ranks = p, .num_microbatches = m});
      const Timeline timeline = checked(zb);
      EXPECT_EQ(timeline.makespan, m >= p ? 3 * m + p - 1 : 2 * m + 2 * p - 1);
      for (int rank = 0; rank < p; ++rank) {
        EXPECT_EQ(timeline.peak_in_flight[static_cast<size_t>(rank)], std::min(2 * p - 1, m));
        if (m >= 2 * p - 1) {
          EXPECT_EQ(span_of(zb, timeline, rank), 3 * m);
        }
      }
    }
  }
}

TEST(InterleavedZeroBubble, ReachesItsClosedFormForEveryNumberOfMicrobatches) {
  EXPECT_EQ(
      row(interleaved_zero_bubble({.num_ranks = 2, .num_chunks = 2, .num_microbatches = 2}), 1),
      "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1");
  for (const int p : kRanks) {
    for (const int v : {1, 2, 3}) {
      for (int m = p; m <= 3 * p + 2; ++m) {
        SCOPED_TRACE(testing::Message() << "p " << p << " v " << v << " m " << m);
        const GroupedShape shape{.num_ranks = p, .num_chunks = v, .num_microbatches = m};
        const Timeline timeline = checked(interleaved_zero_bubble(shape));
        EXPECT_EQ(timeline.makespan, 3 * v * m + p - 1);
        if (m % p != 0) continue;  // larger groups
        for (const int64_t peak : timeline.peak_in_flight) EXPECT_EQ(peak, std::min(p, m) * v);
      }
    }
  }
}

TEST(InterleavedZeroBubble, WithOneChunkIsZbH1) {
  EXPECT_EQ(interleaved_zero_bubble({.num_ranks = 4, .num_chunks = 1, .num_microbatches = 7}),
            zb_h1({.num_ranks = 4, .num_microbatches = 7}));
}

TEST(LoopedBfs, GoesBreadthFirstAndBackFromTheNewest) {
  const ChunkedShape small{.num_ranks = 2, .num_chunks = 2, .num_microbatches = 2};
  EXPECT_EQ(row(looped_bfs(small), 0), "0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0");
  for (const int p : kRanks) {
    for (const int v : {1, 2, 3}) {
      for (const int m : {p, p + 1, 2 * p, 3 * p}) {
        SCOPED_TRACE(testing::Message() << "p " << p << " v " << v << " m " << m);
        const Timeline timeline =
            checked(looped_bfs({.num_ranks = p, .num_chunks = v, .num_microbatches = m}));
        EXPECT_EQ(timeline.makespan, 3 * (v * m + p - 1));
        for (const int64_t peak : timeline.peak_in_flight) EXPECT_EQ(peak, v * m);
      }
    }
  }
}

TEST(GroupInterleaved, TradesMemoryForBubble) {
  for (const int p : kRanks) {
    for (const int v : {1, 2, 3}) {
      for (int group = (p + 1) / 2; group <= p; ++group) {
        // From two groups and p microbatches on.
        for (int m = 2 * group; m <= 5 * group; m += group) {
          if (m < p) continue;
          SCOPED_TRACE(testing::Message()
                       << "p " << p << " v " << v << " m " << m << " group " << group);
          const Schedule schedule = group_interleaved(
              {.num_ranks = p, .num_chunks = v, .num_microbatches = m, .group_size = group});
          const Timeline timeline = checked(schedule);
          EXPECT_EQ(timeline.makespan, 3 * v * m + 2 * (p - 1) + (v - 1) * (p - group));
          for (int rank = 0; rank < p; ++rank) {
            EXPECT_EQ(timeline.peak_in_flight[static_cast<size_t>(rank)],
                      std::min((v - 1) * group + p - rank, v * m));
          }
        }
      }
    }
  }
}

TEST(GroupInterleaved, PicksTheSmallestGroupThatRuns) {
  int num_larger = 0;
  for (const int p : kRanks) {
    for (int m = 1; m <= 3 * p; ++m) {
      SCOPED_TRACE(testing::Message() << "p " << p << " m " << m);
      GroupedShape shape{.num_ranks = p, .num_chunks = 3, .num_microbatches = m};
      const Schedule chosen = group_interleaved(shape);
      ASSERT_NO_THROW(validate(chosen));
      for (int group = (p + 1) / 2;; ++group) {
        shape.group_size = group;
        if (message_of([&] { group_interleaved(shape); }) != "no error") {
          ++num_larger;
          continue;
        }
        EXPECT_EQ(group_interleaved(shape), chosen);
        break;
      }
    }
  }
  EXPECT_GT(num_larger, 0);
}

TEST(GroupInterleaved, RefusesGroupsThatAreTooSmallOrDeadlock) {
  const auto refusal = [](int group) {
    return message_of([&] {
      group_interleaved(
          {.num_ranks = 8, .num_chunks = 3, .num_microbatches = 17, .group_size = group});
    });
  };
  EXPECT_NE(refusal(3).find("needs at least half of the 8 ranks: 4"), std::string::npos);
  EXPECT_NE(refusal(4).find("Nearest legal group_size: 5;"), std::string::npos) << refusal(4);
  EXPECT_EQ(refusal(5), "no error");
}

// A multiplier of 1 holds p-r-1 chunks fewer; free messages cost nothing in either case.
TEST(Interleaved, WarmupMultiplierOneSavesMemoryAndKeepsTheMakespan) {
  for (const int p : kRanks) {
    for (const int v : {2, 3}) {
      for (const int m : {p, 2 * p, 4 * p, 4 * p + 1}) {
        SCOPED_TRACE(testing::Message() << "p " << p << " v " << v << " m " << m);
        InterleavedShape shape{.num_ranks = p, .num_chunks = v, .num_microbatches = m};
        shape.group_size = best_group_size(shape);
        shape.warmup_multiplier = 1;
        const Timeline timeline = checked(interleaved_one_f_one_b(shape));
        EXPECT_EQ(timeline.makespan, 3 * (v * m + p - 1));
        for (int rank = 0; rank < p; ++rank) {
          EXPECT_EQ(timeline.peak_in_flight[static_cast<size_t>(rank)],
                    std::min(p - 1 - rank + (v - 1) * *shape.group_size + 1, v * m));
        }
      }
    }
  }
  EXPECT_NE(message_of([] {
              interleaved_one_f_one_b(
                  {.num_ranks = 2, .num_chunks = 2, .num_microbatches = 2, .warmup_multiplier = 3});
            }).find("warmup_multiplier must be 1 or 2, got 3"),
            std::string::npos);
}

TEST(Interleaved, BestGroupSizeDoesNotDependOnTheWarmupMultiplier) {
  for (const int p : {1, 2, 3, 4, 6}) {
    for (const int v : {2, 3}) {
      for (int m = 1; m <= 12; ++m) {
        double best = std::numeric_limits<double>::infinity();
        int best_group = 0;
        for (int group = 1; group <= m; ++group) {
          const InterleavedShape shape{.num_ranks = p,
                                       .num_chunks = v,
                                       .num_microbatches = m,
                                       .group_size = group,
                                       .warmup_multiplier = 1};
          if (message_of([&] { interleaved_one_f_one_b(shape); }) != "no error") continue;
          const double makespan = simulate(interleaved_one_f_one_b(shape), {}).makespan;
          if (makespan < best) {
            best = makespan;
            best_group = group;
          }
        }
        EXPECT_EQ(best_group,
                  best_group_size({.num_ranks = p, .num_chunks = v, .num_microbatches = m}));
      }
    }
  }
}

// With a message latency c and 2p microbatches or more: ZB-H1 pays 4c(p-1), ZB-H2 c(p-1),
// interleaved zero-bubble c((v+3)p-4), breadth first 2c(p-1).
TEST(ZeroBubble, MessageLatencyMatchesTheClosedForms) {
  const double c = 0.1;
  const Costs costs{.send = c};
  for (const int p : {2, 4, 8}) {
    for (const int k : {2, 3}) {
      const int m = k * p;
      SCOPED_TRACE(testing::Message() << "p " << p << " m " << m);
      const PipelineShape shape{.num_ranks = p, .num_microbatches = m};
      EXPECT_NEAR(simulate(zb_h1(shape), costs).makespan, 3 * m + p - 1 + 4 * c * (p - 1), 1e-9);
      EXPECT_NEAR(simulate(zb_h2(shape), costs).makespan, 3 * m + p - 1 + c * (p - 1), 1e-9);
      for (const int v : {2, 3}) {
        const GroupedShape grouped{.num_ranks = p, .num_chunks = v, .num_microbatches = m};
        EXPECT_NEAR(simulate(interleaved_zero_bubble(grouped), costs).makespan,
                    3 * v * m + p - 1 + c * ((v + 3) * p - 4), 1e-9);
        EXPECT_NEAR(
            simulate(looped_bfs({.num_ranks = p, .num_chunks = v, .num_microbatches = m}), costs)
                .makespan,
            3 * (v * m + p - 1) + 2 * c * (p - 1), 1e-9);
      }
    }
  }
}

}  // namespace
}  // namespace megacore::pipeline
