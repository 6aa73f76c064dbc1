// DualPipe, DualPipeV and pairs that overlap.

#include <gtest/gtest.h>

#include "megacore/pipeline/schedules/generators.h"
#include "schedule_checks.h"

namespace megacore::pipeline {
namespace {

TEST(DualPipeV, OverlapsForwardsWithBackwards) {
  const Schedule schedule = dualpipe_v({.num_ranks = 2, .num_microbatches = 4});
  EXPECT_EQ(to_text(schedule),
            "#megacore v1 name=dualpipe_v num_ranks=2 num_stages=4 num_microbatches=4\n"
            "rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B 3B2 "
            "(3F3;0B1)OVERLAP_F_B 3B3 0I2 0W2 0I3 0W3\n"
            "rank 1: 1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0)OVERLAP_F_B (1F3;2B1)OVERLAP_F_B "
            "(2F3;1B1)OVERLAP_F_B 2B2 1B2 2I3 1I3 2W3 1W3\n");
}

TEST(DualPipeV, ReachesItsClosedForm) {
  for (int p = 1; p <= 9; ++p) {
    for (const int m : {2 * p, 2 * p + 1, 3 * p + 1, 6 * p}) {
      SCOPED_TRACE(testing::Message() << "p " << p << " m " << m);
      const Timeline timeline = checked(dualpipe_v({.num_ranks = p, .num_microbatches = m}));
      EXPECT_EQ(timeline.makespan, 6 * m + 2 * (p - 1));
      for (const int64_t peak : timeline.peak_in_flight) EXPECT_EQ(peak, 2 * p + 1);
    }
  }
}

TEST(DualPipe, SendsOneHalfInEachDirection) {
  const Schedule schedule = dualpipe({.num_ranks = 2, .num_microbatches = 4});
  EXPECT_EQ(to_text(schedule),
            "#megacore v1 name=dualpipe num_ranks=2 num_stages=4 num_microbatches=4 num_chains=2\n"
            "rank 0: 0F0 3F2 0F1 3B2 (3F3;0B0)OVERLAP_F_B 3B3 0I1 0W1\n"
            "rank 1: 2F2 1F0 2F3 1B0 (1F1;2B2)OVERLAP_F_B 1B1 2I3 2W3\n");
}

TEST(DualPipe, ReachesItsClosedForm) {
  for (const int p : {2, 4, 6, 8}) {
    for (const int m : {2 * p, 2 * p + 2, 4 * p}) {
      SCOPED_TRACE(testing::Message() << "p " << p << " m " << m);
      const Timeline timeline = checked(dualpipe({.num_ranks = p, .num_microbatches = m}));
      EXPECT_EQ(timeline.makespan, 3 * m + p - 2);
      for (const int64_t peak : timeline.peak_in_flight) EXPECT_EQ(peak, p + 1);
    }
  }
}

TEST(DualPipe, NamesTheRuleItRefusesBy) {
  const auto refusal = [](int p, int m) {
    return message_of([&] { dualpipe({.num_ranks = p, .num_microbatches = m}); });
  };
  EXPECT_NE(refusal(3, 8).find("dualpipe needs an even number, for example 4"), std::string::npos);
  EXPECT_NE(refusal(4, 6).find("needs at least 2 per rank: 8"), std::string::npos);
  EXPECT_NE(refusal(4, 9).find("use 8 or 10"), std::string::npos);
  EXPECT_NE(message_of([] {
              dualpipe_v({.num_ranks = 4, .num_microbatches = 7});
            }).find("dualpipe_v needs at least 2 per rank: 8"),
            std::string::npos);
}

TEST(DualPipe, CannotBeWrittenAsPyTorchsCsv) {
  EXPECT_NE(message_of([] {
              to_csv(dualpipe({.num_ranks = 2, .num_microbatches = 4}));
            }).find("has 2 chains of stages; PyTorch's CSV knows one"),
            std::string::npos);
}

TEST(Overlap, EvaluationFormHasNoPairs) {
  EXPECT_TRUE(forward_only(dualpipe_v({.num_ranks = 2, .num_microbatches = 4})).overlaps.empty());
}

// The pair starts with the inputs of both and ends at once: 1F1 waits for the gradient of 2B0.
TEST(Overlap, PairsStartTogetherAndHideTheShorterOne) {
  const Schedule schedule =
      schedule_from_text("rank 0: 0F0 0F1 1F0 1B0 (1F1;0B0)OVERLAP_F_B 1B1 0B1\n");
  ASSERT_EQ(schedule.overlaps, (std::vector<int64_t>{4}));
  const Timeline plain = simulate(schedule, {});
  EXPECT_EQ(plain.makespan, 12);
  EXPECT_EQ(plain.spans[4].start, 5);
  EXPECT_EQ(plain.spans[5].end, 8);
  const Timeline hidden = simulate(schedule, {.overlap = 1.0});
  EXPECT_EQ(hidden.makespan, 11);
  EXPECT_EQ(hidden.spans[4].start, 5);
  EXPECT_EQ(hidden.spans[5].end, 7);
  EXPECT_EQ(hidden.busy[0], 11);
  EXPECT_THROW(simulate(schedule, {.overlap = 1.5}), std::invalid_argument);
}

// Run one after the other both ranks would go on; as a pair each waits for the other's forward.
TEST(Overlap, APairThatWaitsForItselfIsADeadlock) {
  const std::string text =
      "rank 0: 0F0 (0F1;0B0)OVERLAP_F_B 0B1\n"
      "rank 1: 1F0 1F1 1B0 1B1\n";
  const std::string message = message_of([&] { validate(schedule_from_text(text)); });
  EXPECT_NE(message.find("rank 0 stops at position 1: 0B0 waits for 1B0"), std::string::npos)
      << message;
  std::string apart = text;
  apart.replace(apart.find("(0F1;0B0)OVERLAP_F_B"), 20, "0F1 0B0");
  EXPECT_NO_THROW(validate(schedule_from_text(apart)));
}

TEST(Overlap, OnlyAForwardAndAnotherBackwardPairUp) {
  Schedule schedule = one_f_one_b({.num_ranks = 1, .num_microbatches = 2});
  schedule.overlaps = {1};  // 0B0 with 0F1
  EXPECT_NE(message_of([&] { validate(schedule); }).find("0B0 is marked to overlap"),
            std::string::npos);
  schedule.overlaps = {0};  // 0F0 with 0B0: the backward needs the forward
  EXPECT_THROW(validate(schedule), std::invalid_argument);
  schedule.overlaps = {7};
  EXPECT_THROW(validate(schedule), std::invalid_argument);
}

TEST(Overlap, BrokenPairsAreNamed) {
  for (const char* cell :
       {"(0F1;0B0)OVERLAP", "(0F1)OVERLAP_F_B", "(0F1;0B0;0F0)OVERLAP_F_B", "("}) {
    const std::string text = std::string("rank 0: 0F0 ") + cell + " 0B1\n";
    EXPECT_NE(message_of([&] { schedule_from_text(text); }).find("is not a pair"),
              std::string::npos)
        << cell;
  }
}

}  // namespace
}  // namespace megacore::pipeline
