#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "megacore/pipeline/schedule.h"
#include "megacore/pipeline/schedules/generators.h"
#include "schedule_checks.h"

namespace megacore::pipeline {
namespace {

TEST(ScheduleText, HasOneLinePerRank) {
  EXPECT_EQ(to_text(one_f_one_b({.num_ranks = 2, .num_microbatches = 3})),
            "#megacore v1 name=1f1b num_ranks=2 num_stages=2 num_microbatches=3\n"
            "rank 0: 0F0 0F1 0B0 0F2 0B1 0B2\n"
            "rank 1: 1F0 1B0 1F1 1B1 1F2 1B2\n");
}

TEST(ScheduleText, TextAndCsvReadBackEqual) {
  for (const int p : {1, 2, 5}) {
    for (const int v : {1, 2, 3}) {
      const Schedule schedule =
          interleaved_one_f_one_b({.num_ranks = p, .num_chunks = v, .num_microbatches = 2 * p});
      const Schedule read = schedule_from_text(to_text(schedule));
      EXPECT_EQ(read, schedule);
      EXPECT_EQ(read.name, schedule.name);
      EXPECT_EQ(schedule_from_csv(to_csv(schedule), "csv"), schedule);
      EXPECT_EQ(schedule_from_csv(to_csv(forward_only(schedule)), "csv"), forward_only(schedule));
    }
  }
}

TEST(ScheduleText, HeaderTellsWhatMissingRowsCannot) {
  const Schedule schedule = schedule_from_text(
      "#megacore v1 name=x num_microbatches=2\n"
      "rank 0: 0F0\n");
  EXPECT_EQ(schedule.num_microbatches, 2);
  EXPECT_FALSE(schedule.forward_only);
  const Schedule evaluation = forward_only(gpipe({.num_ranks = 2, .num_microbatches = 1}));
  EXPECT_EQ(schedule_from_text(to_text(evaluation)), evaluation);
  EXPECT_EQ(
      message_of([] { schedule_from_text("#megacore v1 num_microbatches=x\nrank 0: 0F0\n"); }),
      "line 1: 'num_microbatches=x' should be a number");
}

TEST(ScheduleCsv, IsPyTorchsDialect) {
  EXPECT_EQ(to_csv(one_f_one_b({.num_ranks = 2, .num_microbatches = 2})),
            "0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n");
}

TEST(ScheduleCsv, EmptyCellsAreIdleAndThePlacementFollowsFromTheRows) {
  const Schedule schedule = schedule_from_csv("0F0,,, 3F0 ,3B0,,,0B0\n,1F0,2F0,,,2B0,1B0,\n", "v");
  EXPECT_EQ(schedule.placement, Placement({0, 1, 1, 0}));
  EXPECT_EQ(schedule.placement.chunk_of(3), 1);
  EXPECT_EQ(schedule.num_microbatches, 1);
  EXPECT_EQ(schedule.rank_actions(0).size(), 4U);
}

TEST(ScheduleCsv, ErrorsNameRowAndColumn) {
  EXPECT_EQ(message_of([] { schedule_from_csv("0F0,0B0\n1F0,1F0garbage\n", "x"); }).substr(0, 16),
            "row 2, column 2:");
  EXPECT_NE(message_of([] {
              schedule_from_csv("0F0\n0F1\n", "x");
            }).find("stage 0 runs on rank 0 and on rank 1"),
            std::string::npos);
  EXPECT_NE(message_of([] { schedule_from_csv("0F0\n2F0\n", "x"); }).find("no row runs stage 1"),
            std::string::npos);
  EXPECT_NE(message_of([] { schedule_from_csv("0F0,0SEND_F0\n", "x"); }).find("is communication"),
            std::string::npos);
  EXPECT_NE(message_of([] { schedule_from_csv("", "x"); }).find("is empty"), std::string::npos);
  EXPECT_NE(message_of([] { schedule_from_csv("0F0\n,\n", "x"); }).find("runs no stage"),
            std::string::npos);
  EXPECT_NE(message_of([] { schedule_from_csv("2000000000F0\n", "x"); }).find("above the limit"),
            std::string::npos);
  EXPECT_NE(message_of([] { schedule_from_csv("0F2147483647\n", "x"); }).find("above the limit"),
            std::string::npos);
}

TEST(ScheduleText, ErrorsNameTheLine) {
  EXPECT_EQ(message_of([] { schedule_from_text("rank 0: 0F0\nrank 2: 1F0\n"); }),
            "line 2: 'rank 2: 1F0' should start with 'rank 1:'");
  EXPECT_NE(message_of([] { schedule_from_text("rank 0: 0F0 x\n"); }).find("line 1: 'x' is not"),
            std::string::npos);
}

TEST(Placement, RefusesGapsAndAnswersBothWays) {
  EXPECT_THROW(Placement({0, 2}), std::invalid_argument);
  EXPECT_THROW(Placement({0, -1}), std::invalid_argument);
  EXPECT_THROW(Placement(std::vector<int32_t>{}), std::invalid_argument);
  const Placement loop = Placement::loop({.num_ranks = 2, .num_chunks = 3});
  EXPECT_EQ(loop.num_chunks(), 3);
  EXPECT_EQ(loop.stages_of(1)[2], 5);
  EXPECT_EQ(loop.next(5), -1);
  EXPECT_EQ(loop.previous(0), -1);
}

}  // namespace
}  // namespace megacore::pipeline
