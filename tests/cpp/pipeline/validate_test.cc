#include "megacore/pipeline/validate.h"

#include <gtest/gtest.h>

#include <random>
#include <stdexcept>
#include <string>

#include "megacore/pipeline/schedules/generators.h"
#include "schedule_checks.h"

namespace megacore::pipeline {
namespace {

std::string schedule_error(const Schedule& schedule) {
  return message_of([&] { validate(schedule); });
}

void remove_action(Schedule& schedule, size_t index) {
  schedule.actions.erase(schedule.actions.begin() + static_cast<std::ptrdiff_t>(index));
  for (int64_t& offset : schedule.offsets) {
    if (offset > static_cast<int64_t>(index)) --offset;
  }
}

TEST(Validate, AcceptsSplitBackwardsAndAnyPlacement) {
  EXPECT_EQ(schedule_error(schedule_from_text("rank 0: 0F0 3F0 3I0 3W0 0I0 0W0\n"
                                              "rank 1: 1F0 2F0 2B0 1B0\n")),
            "no error");
}

TEST(Validate, ListsMissingRepeatedAndMisplacedActions) {
  Schedule schedule = one_f_one_b({.num_ranks = 2, .num_microbatches = 3});
  schedule.actions[1] = {0, ActionKind::kForward, 0};   // repeats 0F0, drops 0F1
  schedule.actions[6] = {0, ActionKind::kForward, 2};   // on the wrong rank
  schedule.actions[7] = {1, ActionKind::kBackward, 9};  // no such microbatch
  const std::string text = schedule_error(schedule);
  EXPECT_TRUE(mentions(text, "rank 0, position 1: 0F0 is repeated"));
  EXPECT_TRUE(mentions(text, "rank 0: 0F1 is missing"));
  EXPECT_TRUE(mentions(text, "rank 1, position 0: 0F2 belongs to rank 0, which holds stage 0"));
  EXPECT_TRUE(mentions(text, "rank 1, position 1: 1B9: microbatch 9 is outside 0..2"));
  EXPECT_TRUE(mentions(text, "rank 0: 0F0 >0F0< 0B0"));
}

TEST(Validate, ChecksThatASplitBackwardIsWhole) {
  EXPECT_TRUE(mentions(schedule_error(schedule_from_text("rank 0: 0F0 0I0\n")),
                       "0W0 is missing beside its I"));
  EXPECT_TRUE(mentions(schedule_error(schedule_from_text("rank 0: 0F0 0B0 0W0\n")),
                       "0B0 stands beside I or W"));
  EXPECT_TRUE(mentions(schedule_error(schedule_from_text("rank 0: 0F0 0W0 0I0\n")),
                       "0W0 waits for 0I0 (rank 0, position 2)"));
}

TEST(Validate, DeadlockNamesEveryStuckRankAndMarksItInTheTable) {
  const std::string text =
      schedule_error(schedule_from_text("rank 0: 0F0 0F1 0B1 0B0\n"
                                        "rank 1: 1F0 1B0 1F1 1B1\n"
                                        "rank 2: 2F1 2F0 2B0 2B1\n"));
  EXPECT_TRUE(mentions(text, "3 of 3 ranks"));
  EXPECT_TRUE(mentions(text, "rank 0 stops at position 2: 0B1 waits for 1B1 (rank 1, position 3)"));
  EXPECT_TRUE(mentions(text, "rank 1 stops at position 1: 1B0 waits for 2B0 (rank 2, position 2)"));
  EXPECT_TRUE(mentions(text, "rank 2 stops at position 0: 2F1 waits for 1F1 (rank 1, position 2)"));
  EXPECT_TRUE(mentions(text, "rank 0: 0F0 0F1 >0B1< 0B0\n"));
  EXPECT_TRUE(mentions(text, "rank 2: >2F1< 2F0 2B0 2B1\n"));
}

TEST(Validate, LongRowsAreCutAroundTheStuckAction) {
  Schedule schedule = one_f_one_b({.num_ranks = 2, .num_microbatches = 100});
  std::swap(schedule.actions[119], schedule.actions[122]);  // 0F60 and 0B60
  const std::string text = schedule_error(schedule);
  EXPECT_TRUE(mentions(text, "more)"));
  EXPECT_LT(text.size(), 1500U);
}

TEST(Validate, RefusesShapesThatDoNotCoverTheirActions) {
  Schedule schedule = gpipe({.num_ranks = 2, .num_microbatches = 2});
  schedule.offsets.back() -= 1;
  EXPECT_TRUE(mentions(schedule_error(schedule), "do not cover"));
  schedule = gpipe({.num_ranks = 2, .num_microbatches = 2});
  schedule.num_microbatches = 1 << 30;
  EXPECT_TRUE(mentions(schedule_error(schedule), "need 2147483648 forwards at least"));
}

TEST(Validate, AForwardOnlyScheduleHoldsNoBackward) {
  Schedule schedule = forward_only(gpipe({.num_ranks = 2, .num_microbatches = 2}));
  EXPECT_EQ(schedule_error(schedule), "no error");
  schedule.actions[1] = {0, ActionKind::kBackward, 0};
  EXPECT_TRUE(
      mentions(schedule_error(schedule), "is a backward, but the schedule is forward-only"));
}

// A dropped or duplicated action always shows. A swap of two neighbours of one rank is either still
// a legal order (then every dependency holds in it) or found as a deadlock.
TEST(Validate, FindsSeededFaults) {
  std::mt19937 random(7);
  const auto below = [&](size_t limit) {
    return std::uniform_int_distribution<size_t>(0, limit - 1)(random);
  };
  for (int round = 0; round < 300; ++round) {
    const int p = 2 + static_cast<int>(below(5));
    const int v = 1 + static_cast<int>(below(3));
    const int m = 1 + static_cast<int>(below(9));
    const Schedule good =
        interleaved_one_f_one_b({.num_ranks = p, .num_chunks = v, .num_microbatches = m});
    ASSERT_EQ(schedule_error(good), "no error");

    Schedule dropped = good;
    remove_action(dropped, below(dropped.actions.size()));
    EXPECT_TRUE(mentions(schedule_error(dropped), "is missing"));

    Schedule duplicated = good;
    const size_t from = below(good.actions.size());
    const size_t to = below(good.actions.size());
    duplicated.actions[to] = duplicated.actions[from];
    if (from != to) {
      EXPECT_NE(schedule_error(duplicated), "no error");
    }

    // A backward ahead of its own forward can never run.
    Schedule swapped = good;
    const size_t f = below(good.actions.size());
    if (swapped.actions[f].kind != ActionKind::kForward) continue;
    for (size_t b = f + 1; b < swapped.actions.size(); ++b) {
      if (swapped.actions[b] ==
          Action{swapped.actions[f].stage, ActionKind::kBackward, swapped.actions[f].microbatch}) {
        std::swap(swapped.actions[f], swapped.actions[b]);
        EXPECT_TRUE(mentions(schedule_error(swapped), "deadlocks"));
        break;
      }
    }
  }
}

}  // namespace
}  // namespace megacore::pipeline
