#include "megacore/pipeline/schedules/generators.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>

#include "megacore/pipeline/schedules/schedule_table.h"
#include "megacore/pipeline/simulate.h"
#include "megacore/pipeline/validate.h"
#include "schedule_checks.h"

namespace megacore::pipeline {
namespace {

using Order = std::vector<int32_t>;

Schedule interleaved(int p, int v, int m, std::optional<int> group_size = std::nullopt) {
  return interleaved_one_f_one_b(
      {.num_ranks = p, .num_chunks = v, .num_microbatches = m, .group_size = group_size});
}

TEST(Gpipe, RunsAllForwardsThenAllBackwardsInOneOrder) {
  EXPECT_EQ(row(gpipe({.num_ranks = 2, .num_microbatches = 3}), 1), "1F0 1F1 1F2 1B0 1B1 1B2");
}

TEST(OneFOneB, WarmsUpWithOneForwardPerFollowingRank) {
  const Schedule schedule = one_f_one_b({.num_ranks = 3, .num_microbatches = 4});
  EXPECT_EQ(row(schedule, 0), "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3");
  EXPECT_EQ(row(schedule, 1), "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3");
  EXPECT_EQ(row(schedule, 2), "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3");
}

TEST(OneFOneB, WorksWithFewerMicrobatchesThanRanks) {
  EXPECT_EQ(row(one_f_one_b({.num_ranks = 4, .num_microbatches = 1}), 0), "0F0 0B0");
}

TEST(ScheduleTable, CutsAShortLastGroup) {
  const auto table = schedule_table({.num_microbatches = 5, .num_chunks = 2, .group_size = 3});
  const std::vector<TableEntry> expected = {{0, 0}, {1, 0}, {2, 0}, {0, 1}, {1, 1},
                                            {2, 1}, {3, 0}, {4, 0}, {3, 1}, {4, 1}};
  EXPECT_EQ(table, expected);
}

// Worked by hand from the warmup count and the table; the first is also the commented example of
// Megatron-LM, the third the corrected one of the source document on partial CUDA graphs.
TEST(Interleaved, OrderListsAreTheKnownOnes) {
  EXPECT_EQ(order_list(interleaved(2, 2, 5, 3), 0),
            (Order{1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1}));
  EXPECT_EQ(order_list(interleaved(2, 2, 5, 3), 1),
            (Order{1, 1, 1, 2, -2, 2, -2, 2, -2, 1, -1, 1, -1, 2, -1, 2, -2, -2, -1, -1}));
  EXPECT_EQ(order_list(interleaved(4, 2, 8, 4), 0),
            (Order{1, 1,  1, 1,  2, 2,  2,  2,  1,  1,  1,  -2, 1,  -2, 2,  -2,
                   2, -2, 2, -1, 2, -1, -1, -1, -2, -2, -2, -2, -1, -1, -1, -1}));
  EXPECT_EQ(order_list(interleaved(4, 2, 8, 4), 3),
            (Order{1, 1,  1, 1,  2, -2, 2, -2, 2, -2, 2, -2, 1,  -1, 1,  -1,
                   1, -1, 1, -1, 2, -2, 2, -2, 2, -2, 2, -2, -1, -1, -1, -1}));
  EXPECT_EQ(order_list(interleaved(2, 2, 7, 4), 0),
            (Order{1, 1,  1, 1,  2, 2,  2, -2, 2,  -2, 1,  -2, 1,  -2,
                   1, -1, 2, -1, 2, -1, 2, -1, -2, -2, -2, -1, -1, -1}));
  EXPECT_EQ(order_list(one_f_one_b({.num_ranks = 4, .num_microbatches = 4}), 0),
            (Order{1, 1, 1, 1, -1, -1, -1, -1}));
}

TEST(Interleaved, WithOneChunkIsOneFOneB) {
  EXPECT_EQ(interleaved(4, 1, 8), one_f_one_b({.num_ranks = 4, .num_microbatches = 8}));
  EXPECT_EQ(interleaved(4, 1, 8, 3), one_f_one_b({.num_ranks = 4, .num_microbatches = 8}));
}

TEST(Interleaved, WarmupCountsAreTheTabulatedOnes) {
  struct Row {
    int p, v, group, first, last;
  };
  for (const Row& row : {Row{2, 2, 2, 4, 2}, Row{4, 2, 4, 10, 4}, Row{4, 2, 6, 12, 6},
                         Row{4, 4, 4, 18, 12}, Row{8, 2, 8, 22, 8}, Row{8, 4, 8, 38, 24}}) {
    const InterleavedShape shape{
        .num_ranks = row.p, .num_chunks = row.v, .num_microbatches = 96, .group_size = row.group};
    EXPECT_EQ(interleaved_warmup(shape, 0), row.first);
    EXPECT_EQ(interleaved_warmup(shape, row.p - 1), row.last);
    const Timeline timeline = simulate(interleaved_one_f_one_b(shape), {});
    EXPECT_EQ(timeline.peak_in_flight.front(), row.first + 1);
    EXPECT_EQ(timeline.peak_in_flight.back(), row.last + 1);
  }
}

// Every group size that can run is accepted, every other refused: the oracle is validate() on the
// order itself, built here from the table. And the best group is the smallest of the fastest.
TEST(Interleaved, AcceptsExactlyWhatRunsAndPicksTheSmallestBestGroup) {
  int num_refused = 0;
  for (const int p : {1, 2, 3, 4, 6, 8}) {
    for (const int v : {2, 3, 4}) {
      for (int m = 1; m <= 24; ++m) {
        SCOPED_TRACE(testing::Message() << "p " << p << " v " << v << " m " << m);
        double best = std::numeric_limits<double>::infinity();
        int best_group = 0;
        for (int group = 1; group <= m + p + 1; ++group) {
          const InterleavedShape shape{
              .num_ranks = p, .num_chunks = v, .num_microbatches = m, .group_size = group};
          double makespan = 0.0;
          try {
            const Schedule schedule = interleaved_one_f_one_b(shape);
            ASSERT_NO_THROW(validate(schedule)) << group;
            makespan = simulate(schedule, {}).makespan;
          } catch (const std::invalid_argument&) {
            ++num_refused;
            ASSERT_TRUE(group < p || (m % group != 0 && m % group < p)) << group;
            continue;
          }
          if (makespan < best) {
            best = makespan;
            best_group = group;
          }
        }
        const int long_side = std::max(m, p);
        EXPECT_EQ(best, 3.0 * (long_side * v + std::min(m, p) - 1));
        EXPECT_EQ(best_group,
                  best_group_size({.num_ranks = p, .num_chunks = v, .num_microbatches = m}));
      }
    }
  }
  EXPECT_GT(num_refused, 100);
}

TEST(Interleaved, ChoosesAGroupThatNeedsNoMultipleOfTheRanks) {
  const auto best = [](int p, int v, int m) {
    return best_group_size({.num_ranks = p, .num_chunks = v, .num_microbatches = m});
  };
  EXPECT_EQ(best(4, 2, 8), 4);
  EXPECT_EQ(best(4, 2, 7), 7);
  EXPECT_EQ(best(4, 2, 9), 5);
  EXPECT_EQ(best(4, 2, 10), 5);
  EXPECT_EQ(best(8, 2, 17), 9);
  EXPECT_EQ(best(8, 4, 33), 11);
}

TEST(Interleaved, DeadlockNamesTheNearestLegalValues) {
  const std::string text = message_of([] { interleaved(4, 3, 5, 4); });
  EXPECT_NE(text.find("the last group has 1 microbatch, fewer than there are ranks"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("Nearest legal group_size: 5;"), std::string::npos) << text;
  EXPECT_NE(text.find("nearest legal num_microbatches: 4 or 6"), std::string::npos) << text;
  EXPECT_NE(message_of([] { interleaved(4, 2, 8, 2); }).find("Nearest legal group_size: 4;"),
            std::string::npos);
}

TEST(Interleaved, SuggestedValuesWork) {
  EXPECT_NO_THROW(validate(interleaved(4, 3, 5, 5)));
  EXPECT_NO_THROW(validate(interleaved(4, 3, 4, 4)));
  EXPECT_NO_THROW(validate(interleaved(4, 3, 6, 4)));
}

TEST(Generators, RefuseSizesBelowOneAndBeyondMemory) {
  EXPECT_THROW(gpipe({.num_ranks = 0, .num_microbatches = 1}), std::invalid_argument);
  EXPECT_THROW(one_f_one_b({.num_ranks = 1, .num_microbatches = 0}), std::invalid_argument);
  EXPECT_THROW(interleaved(2, 0, 4), std::invalid_argument);
  EXPECT_THROW(interleaved(2, 2, 4, 0), std::invalid_argument);
  const std::string text =
      message_of([] { gpipe({.num_ranks = 100000, .num_microbatches = 100000}); });
  EXPECT_NE(text.find("at most 1342"), std::string::npos) << text;
}

TEST(ForwardOnly, RunsGroupsOfMicrobatchesThroughTheStages) {
  const Schedule schedule = forward_only(interleaved(2, 2, 5));
  EXPECT_NO_THROW(validate(schedule));
  EXPECT_EQ(row(schedule, 0), "0F0 0F1 2F0 2F1 0F2 0F3 0F4 2F2 2F3 2F4");
  EXPECT_EQ(row(forward_only(v_min({.num_ranks = 2, .num_microbatches = 4})), 0),
            "0F0 0F1 0F2 0F3 3F0 3F1 3F2 3F3");
}

Schedule evaluation_of(const Placement& placement, int m) {
  return forward_only(Schedule{
      .name = "", .placement = placement, .num_microbatches = m, .actions = {}, .offsets = {}});
}

// Each form is a lower bound: a rank's head, work and tail, or the way of all microbatches through
// the chain.
TEST(ForwardOnly, TakesTheShortestTime) {
  for (int p = 1; p <= 9; ++p) {
    for (int m = 1; m <= 30; ++m) {
      for (int v = 1; v <= 4; ++v) {
        const Schedule loop = evaluation_of(Placement::loop({.num_ranks = p, .num_chunks = v}), m);
        EXPECT_EQ(simulate(loop, {}).makespan, std::max(v * m + p - 1, v * p + m - 1));
        EXPECT_NO_THROW(validate(loop));
      }
      const Schedule v_shape = evaluation_of(Placement::v({.num_ranks = p}), m);
      EXPECT_EQ(simulate(v_shape, {}).makespan, 2 * m + 2 * (p - 1));
      EXPECT_NO_THROW(validate(v_shape));
      if (m % 2 != 0) continue;
      const Schedule chains = evaluation_of(Placement::bidirectional({.num_ranks = p}), m);
      EXPECT_EQ(simulate(chains, {}).makespan, std::max(m + (p - 1) / 2 * 2, p + m / 2 - 1));
      EXPECT_NO_THROW(validate(chains));
    }
  }
}

// Messages that have arrived, or could have, and wait: their number does not grow with the
// microbatches.
TEST(ForwardOnly, LetsFewMicrobatchesWaitBetweenStages) {
  constexpr int kRanks = 4;
  for (const Placement& placement : {Placement::loop({.num_ranks = kRanks, .num_chunks = 2}),
                                     Placement::v({.num_ranks = kRanks})}) {
    const Schedule schedule = evaluation_of(placement, 203);
    for (int rank = 0; rank < kRanks; ++rank) {
      int ahead = 0;
      for (const Action& action : schedule.rank_actions(rank)) {
        ahead += placement.chunk_of(action.stage) == 0 ? 1 : -1;
        EXPECT_LE(ahead, 3 * kRanks);
      }
    }
  }
}

}  // namespace
}  // namespace megacore::pipeline
