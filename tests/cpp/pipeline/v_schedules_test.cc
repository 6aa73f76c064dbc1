// V placement: ZB-V, V-Half, V-Min and 1F1B-V.

#include <gtest/gtest.h>

#include <algorithm>

#include "megacore/pipeline/schedules/generators.h"
#include "schedule_checks.h"

namespace megacore::pipeline {
namespace {

using Generator = Schedule (*)(const PipelineShape&);

TEST(Placement, VGoesDownTheRanksAndBackUp) {
  const Placement v = Placement::v({.num_ranks = 3});
  EXPECT_EQ(v, Placement({0, 1, 2, 2, 1, 0}));
  EXPECT_EQ(v.num_chunks(), 2);
  EXPECT_EQ(v.stages_of(1)[1], 4);
  EXPECT_EQ(v.next(2), 3);
  EXPECT_EQ(v.num_chains(), 1);
}

TEST(Placement, ChainsAreSeparate) {
  const Placement both = Placement::bidirectional({.num_ranks = 3});
  EXPECT_EQ(both.num_chains(), 2);
  EXPECT_EQ(both.rank_of(0), 0);
  EXPECT_EQ(both.rank_of(3), 2);
  EXPECT_EQ(both.chain_of(3), 1);
  EXPECT_EQ(both.next(2), -1);
  EXPECT_EQ(both.previous(3), -1);
  EXPECT_EQ(both.next(3), 4);
  EXPECT_EQ(both.microbatches_of(2, 8).end, 4);
  EXPECT_EQ(both.microbatches_of(3, 8).begin, 4);
  EXPECT_NE(both, Placement::v({.num_ranks = 3}));
  EXPECT_THROW(Placement({0, 1, 2}, 2), std::invalid_argument);
  EXPECT_THROW(Placement({0, 1}, 0), std::invalid_argument);
}

TEST(VSchedules, SmallOrdersAreTheKnownOnes) {
  const PipelineShape shape{.num_ranks = 2, .num_microbatches = 3};
  EXPECT_EQ(row(zb_v(shape), 0),
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2");
  EXPECT_EQ(row(zb_v(shape), 1),
            "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2");
  EXPECT_EQ(row(v_min(shape), 1),
            "1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2");
  EXPECT_EQ(row(one_f_one_b_v(shape), 0), "0F0 0F1 0F2 3F0 3B0 3F1 3B1 0B0 3F2 3B2 0B1 0B2");
}

TEST(VSchedules, RunForEverySize) {
  for (const Generator generate : {zb_v, v_half, v_min, one_f_one_b_v}) {
    for (int p = 1; p <= 9; ++p) {
      for (const int m : {1, 2, p - 1, p, p + 1, 2 * p - 1, 2 * p + 3}) {
        if (m < 1) continue;
        SCOPED_TRACE(testing::Message() << "p " << p << " m " << m);
        checked(generate({.num_ranks = p, .num_microbatches = m}));
      }
    }
  }
}

TEST(ZbV, NeverWaitsWithinARank) {
  for (int p = 1; p <= 9; ++p) {
    for (const int m : {2 * p - 1, 2 * p, 3 * p + 1, 5 * p}) {
      SCOPED_TRACE(testing::Message() << "p " << p << " m " << m);
      const Schedule schedule = zb_v({.num_ranks = p, .num_microbatches = m});
      const Timeline timeline = simulate(schedule, {});
      EXPECT_EQ(timeline.makespan, 6 * m + p - 1);
      for (int rank = 0; rank < p; ++rank) EXPECT_EQ(span_of(schedule, timeline, rank), 6 * m);
      EXPECT_EQ(peak_of(timeline), std::min(2 * p, 2 * m));
      if (p == 1 || m < 2 * p) continue;
      EXPECT_NEAR(simulate(schedule, {.send = 0.1}).makespan, 6 * m + p - 1 + 0.1 * (5 * p - 7),
                  1e-9);
    }
  }
}

TEST(VHalf, ReachesItsClosedFormWithHalfTheMemory) {
  for (int p = 2; p <= 16; ++p) {
    for (const int m : {p, p + 1, 2 * p, 4 * p + 1}) {
      SCOPED_TRACE(testing::Message() << "p " << p << " m " << m);
      const Timeline timeline = simulate(v_half({.num_ranks = p, .num_microbatches = m}), {});
      const int beyond = p == 2 ? 1 : 3 * p - (p % 2 == 0 ? 7 : 4);
      EXPECT_EQ(timeline.makespan, 6 * m + beyond);
      for (const int64_t peak : timeline.peak_in_flight) {
        EXPECT_EQ(peak, std::min(2 * ((p + 2) / 2), 2 * m));
      }
    }
  }
}

// A message that takes time delays the schedule once, however many microbatches there are.
TEST(VHalf, LatencyDoesNotGrowWithTheMicrobatches) {
  for (const int p : {4, 5, 8, 9}) {
    const auto delay = [&](int m) {
      const Schedule schedule = v_half({.num_ranks = p, .num_microbatches = m});
      return simulate(schedule, {.send = 0.2}).makespan - simulate(schedule, {}).makespan;
    };
    EXPECT_NEAR(delay(2 * p), delay(8 * p), 1e-9) << p;
    EXPECT_LE(delay(2 * p), 0.2 * 6 * p) << p;
  }
}

TEST(VMin, ReachesItsClosedFormWithAThirdOfTheMemory) {
  for (int p = 2; p <= 16; ++p) {
    for (const int m : {p, p + 1, 2 * p, 4 * p + 1}) {
      SCOPED_TRACE(testing::Message() << "p " << p << " m " << m);
      const Timeline timeline = simulate(v_min({.num_ranks = p, .num_microbatches = m}), {});
      EXPECT_EQ(timeline.makespan, 6 * m + 4 * p - 5 - (p % 3 == 0 ? 2 : 0));
      EXPECT_EQ(peak_of(timeline), 2 * ((p + 4) / 3));
    }
  }
}

TEST(OneFOneBV, HasTwoThirdsOfTheMemory) {
  for (int p = 2; p <= 16; ++p) {
    for (const int m : {p, p + 1, 2 * p, 4 * p + 1}) {
      SCOPED_TRACE(testing::Message() << "p " << p << " m " << m);
      const Timeline timeline =
          simulate(one_f_one_b_v({.num_ranks = p, .num_microbatches = m}), {});
      EXPECT_EQ(peak_of(timeline), std::min(2 * ((2 * p + 3) / 3), 2 * m));
      if (p == 2) {
        EXPECT_EQ(timeline.makespan, 6 * m + 4);
      } else if (p % 3 == 0) {
        EXPECT_LE(timeline.makespan, 6 * m + 5 * p - 7);
      } else {
        EXPECT_EQ(timeline.makespan, 6 * m + 5 * p - (p % 3 == 1 ? 5 : 7));
      }
    }
  }
}

// Rows of the published comparison (F = I = W = 1, makespan and peak in stage-chunk units).
TEST(VSchedules, ReproduceThePublishedTable) {
  struct Cell {
    Generator generate;
    int p, m, makespan, peak;
  };
  for (const Cell& cell :
       {Cell{zb_v, 4, 4, 30, 8}, Cell{zb_v, 8, 16, 103, 16}, Cell{zb_v, 16, 128, 783, 32},
        Cell{v_half, 4, 8, 53, 6}, Cell{v_half, 8, 8, 65, 10}, Cell{v_half, 8, 32, 209, 10},
        Cell{v_half, 16, 16, 137, 18}, Cell{v_min, 4, 4, 35, 4}, Cell{v_min, 8, 16, 123, 8},
        Cell{v_min, 16, 64, 443, 12}, Cell{one_f_one_b_v, 4, 8, 63, 6},
        Cell{one_f_one_b_v, 8, 16, 129, 12}, Cell{one_f_one_b_v, 16, 32, 267, 22}}) {
    SCOPED_TRACE(testing::Message() << "p " << cell.p << " m " << cell.m);
    const Timeline timeline =
        simulate(cell.generate({.num_ranks = cell.p, .num_microbatches = cell.m}), {});
    EXPECT_EQ(timeline.makespan, cell.makespan);
    EXPECT_EQ(peak_of(timeline), cell.peak);
  }
}

TEST(VSchedules, RefuseSizesBeyondMemory) {
  for (const Generator generate : {zb_v, v_half, v_min, one_f_one_b_v}) {
    EXPECT_THROW(generate({.num_ranks = 0, .num_microbatches = 1}), std::invalid_argument);
    EXPECT_THROW(generate({.num_ranks = 1, .num_microbatches = 0}), std::invalid_argument);
    EXPECT_NE(message_of([&] {
                generate({.num_ranks = 20000, .num_microbatches = 1});
              }).find("num_ranks is 20000; schedules in V placement are made for up to 4096 ranks"),
              std::string::npos);
    EXPECT_THROW(generate({.num_ranks = 100000, .num_microbatches = 100000}),
                 std::invalid_argument);
  }
}

}  // namespace
}  // namespace megacore::pipeline
