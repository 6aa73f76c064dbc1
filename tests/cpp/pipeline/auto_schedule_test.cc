#include "megacore/pipeline/search/auto_schedule.h"

#include <gtest/gtest.h>

#include "schedule_checks.h"

namespace megacore::pipeline {
namespace {

// Small instances whose optimum a constraint solver proved elsewhere.
TEST(AutoSchedule, ReachesAndProvesKnownOptima) {
  struct Instance {
    Placement (*placement)(int);
    int p, m, limit;
    bool split;
    double send, optimum;
  };
  for (const Instance& i :
       {Instance{chain, 4, 8, 4, false, 0.1, 34.6}, Instance{chain, 4, 8, 4, true, 0.1, 28.2},
        Instance{chain, 4, 16, 4, true, 0.1, 52.2}, Instance{chain, 8, 16, 8, false, 0.1, 73.0},
        Instance{chain, 16, 16, 16, true, 0.1, 66.0},
        Instance{two_chunks, 4, 8, 11, false, 0.1, 57.6},
        Instance{two_chunks, 4, 4, 8, true, 0.1, 28.0}, Instance{v, 4, 4, 6, true, 0.0, 29.0},
        Instance{v, 4, 4, 6, true, 0.1, 30.8}, Instance{v, 4, 4, 4, true, 0.0, 35.0},
        Instance{v, 4, 8, 6, true, 0.0, 53.0}, Instance{v, 8, 8, 10, true, 0.0, 65.0}}) {
    SCOPED_TRACE(testing::Message() << "p " << i.p << " m " << i.m << " limit " << i.limit);
    const AutoSchedule result = auto_schedule({.placement = i.placement(i.p),
                                               .num_microbatches = i.m,
                                               .costs = {.send = i.send},
                                               .split_backward = i.split,
                                               .memory_limit = {i.limit}},
                                              Effort::kFast);
    const Certificate& certificate = result.certificate;
    EXPECT_NEAR(certificate.makespan, i.optimum, 1e-9);
    EXPECT_NEAR(certificate.bound.value, i.optimum, 1e-9);
    EXPECT_TRUE(certificate.is_optimal);
    const Timeline timeline = checked(result.schedule, {.send = i.send});
    EXPECT_NEAR(timeline.makespan, certificate.makespan, 1e-9);
    EXPECT_EQ(timeline.peak_in_flight, certificate.peak_memory);
    EXPECT_LE(peak_of(timeline), i.limit);
  }
}

TEST(AutoSchedule, SaysThatASearchLeftNoOrderOut) {
  const AutoSchedule result = auto_schedule({.placement = two_chunks(2),
                                             .num_microbatches = 6,
                                             .costs = {.send = 0.1},
                                             .split_backward = false,
                                             .memory_limit = {4}},
                                            Effort::kFast);
  EXPECT_EQ(result.certificate.bound.reason, BoundReason::kExhaustion);
  EXPECT_DOUBLE_EQ(result.certificate.gap(), 0.0);
  EXPECT_NEAR(result.certificate.makespan, 40.0, 1e-9);
  EXPECT_EQ(result.certificate.winner, "exact_search");
}

TEST(AutoSchedule, BeatsEveryNamedScheduleWhereThereIsRoom) {
  const AutoSchedule result = auto_schedule(
      {.placement = v(8), .num_microbatches = 8, .costs = {.send = 0.1}, .memory_limit = {16}},
      Effort::kFast);
  ASSERT_FALSE(result.certificate.named.empty());
  EXPECT_LT(result.certificate.makespan, result.certificate.named.front().makespan - 1.0);
}

TEST(AutoSchedule, StaysWithinOnePercentOfTheBoundWithTheMemoryOf1F1B) {
  for (const double send : {0.0, 0.1}) {
    for (const int p : {4, 8, 16}) {
      const AutoSchedule result = auto_schedule({.placement = v(p),
                                                 .num_microbatches = 4 * p,
                                                 .costs = {.send = send},
                                                 .memory_limit = {2 * p}},
                                                Effort::kFast);
      EXPECT_LE(result.certificate.gap(), 0.01) << p << " " << send;
    }
  }
}

TEST(AutoSchedule, RunsMicrobatchesOneByOneInTheSmallestMemory) {
  const AutoSchedule result = auto_schedule({.placement = two_chunks(3),
                                             .num_microbatches = 5,
                                             .memory_limit = {12},
                                             .activation_size = {4, 4, 4, 8, 8, 8}},
                                            Effort::kThorough);
  EXPECT_EQ(result.certificate.peak_memory, (std::vector<int64_t>{12, 12, 12}));
}

TEST(AutoSchedule, RefusesWhatCannotWork) {
  const std::string refusal = message_of([] {
    auto_schedule({.placement = two_chunks(3),
                   .num_microbatches = 5,
                   .memory_limit = {11},
                   .activation_size = {4, 4, 4, 8, 8, 8}},
                  Effort::kFast);
  });
  EXPECT_NE(refusal.find("memory_limit is 11, but a single microbatch holds 12 on rank 0"),
            std::string::npos)
      << refusal;
  // Before a list that is too short is read.
  EXPECT_NE(message_of([] {
              auto_schedule(
                  {.placement = two_chunks(3), .num_microbatches = 5, .activation_size = {4, 4}},
                  Effort::kFast);
            }).find("activation_size has 2 entries"),
            std::string::npos);
  EXPECT_NE(message_of([] {
              auto_schedule(
                  {.placement = Placement::bidirectional({.num_ranks = 2}), .num_microbatches = 4},
                  Effort::kFast);
            }).find("the placement has 2 chains"),
            std::string::npos);
}

}  // namespace
}  // namespace megacore::pipeline
