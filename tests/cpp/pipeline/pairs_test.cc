// 1F1B and interleaved 1F1B whose forwards run together with backwards of older microbatches.

#include <gtest/gtest.h>

#include "megacore/pipeline/schedules/generators.h"
#include "megacore/pipeline/schedules/schedule_catalog.h"
#include "schedule_checks.h"

namespace megacore::pipeline {
namespace {

TEST(Pairs, OneMoreWarmupForwardLetsABackwardMeetAnotherForward) {
  EXPECT_EQ(to_text(one_f_one_b({.num_ranks = 2, .num_microbatches = 4}, Pairs::kWhole)),
            "#megacore v1 name=1f1b num_ranks=2 num_stages=2 num_microbatches=4\n"
            "rank 0: 0F0 0F1 0F2 (0F3;0B0)OVERLAP_F_B 0B1 0B2 0B3\n"
            "rank 1: 1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B (1F3;1B2)OVERLAP_F_B 1B3\n");
  EXPECT_EQ(to_text(one_f_one_b({.num_ranks = 1, .num_microbatches = 3}, Pairs::kSplit)),
            "#megacore v1 name=1f1b num_ranks=1 num_stages=1 num_microbatches=3\n"
            "rank 0: 0F0 (0F1;0I0)OVERLAP_F_B 0W0 (0F2;0I1)OVERLAP_F_B 0W1 0I2 0W2\n");
}

// The list of order tokens of Megatron-LM for its merged passes.
TEST(Pairs, InterleavedOrderIsThePublishedOne) {
  const Schedule schedule = interleaved_one_f_one_b(
      {.num_ranks = 2, .num_chunks = 2, .num_microbatches = 4, .pairs = Pairs::kSplit});
  EXPECT_EQ(order_list(schedule, 0),
            (std::vector<int32_t>{1, 1, 2, 2, 1, 1, -2, 2, -2, 2, -1, -1, -2, -2, -1, -1}));
}

TEST(Pairs, InterleavedReachesItsClosedForms) {
  for (int p = 1; p <= 6; ++p) {
    for (int v = 1; v <= 3; ++v) {
      for (const int m : {p, 2 * p, 2 * p + 1, 4 * p}) {
        SCOPED_TRACE(testing::Message() << "p " << p << " v " << v << " m " << m);
        InterleavedShape shape{.num_ranks = p, .num_chunks = v, .num_microbatches = m};
        shape.group_size = best_group_size(shape);
        const int before = (v - 1) * *shape.group_size + 1;
        const int pairs_of_last = std::max(v * m - before, 0);
        for (const double overlap : {0.0, 0.5, 1.0}) {
          const Costs costs{.forward = {1.0},
                            .backward_input = {1.25},
                            .backward_weight = {0.75},
                            .overlap = overlap};
          shape.pairs = Pairs::kWhole;
          const Timeline whole = checked(interleaved_one_f_one_b(shape), costs);
          EXPECT_DOUBLE_EQ(whole.makespan, 3.0 * (v * m + p - 1) - overlap * pairs_of_last);
          shape.pairs = Pairs::kSplit;
          const Timeline split = checked(interleaved_one_f_one_b(shape), costs);
          if (overlap == 0.0 || v == 1) {
            EXPECT_DOUBLE_EQ(split.makespan,
                             3.0 * v * m + 2.25 * (p - 1) - overlap * pairs_of_last);
          }
          for (int rank = 0; rank < p; ++rank) {
            const int warmup = std::min(2 * (p - 1 - rank) + before, v * m);
            EXPECT_EQ(interleaved_warmup(shape, rank), warmup);
            const auto r = static_cast<size_t>(rank);
            EXPECT_EQ(whole.peak_in_flight[r], std::min(warmup + 1, v * m));
            EXPECT_EQ(split.peak_in_flight[r], whole.peak_in_flight[r]);
          }
        }
      }
    }
  }
}

TEST(Pairs, OneStagePerRankIsInterleavingWithOneChunk) {
  for (int p = 1; p <= 5; ++p) {
    for (const int m : {1, p, 3 * p + 1}) {
      for (const Pairs pairs : {Pairs::kWhole, Pairs::kSplit}) {
        EXPECT_EQ(one_f_one_b({.num_ranks = p, .num_microbatches = m}, pairs),
                  interleaved_one_f_one_b(
                      {.num_ranks = p, .num_chunks = 1, .num_microbatches = m, .pairs = pairs}));
      }
    }
  }
}

// What runs without pairs runs with them, whatever the sizes.
TEST(Pairs, AllSizesThatAreAcceptedRun) {
  int num_refused = 0;
  for (int p = 1; p <= 4; ++p) {
    for (int v = 1; v <= 3; ++v) {
      for (int m = 1; m <= 11; ++m) {
        for (int group = 1; group <= 12; ++group) {
          InterleavedShape shape{
              .num_ranks = p, .num_chunks = v, .num_microbatches = m, .group_size = group};
          for (const int multiplier : {1, 2}) {
            shape.warmup_multiplier = multiplier;
            shape.pairs = Pairs::kSplit;
            try {
              const Schedule schedule = interleaved_one_f_one_b(shape);
              EXPECT_NO_THROW(validate(schedule));
            } catch (const std::invalid_argument&) {
              ++num_refused;
              EXPECT_FALSE(group >= p && (m % group == 0 || m % group >= p));
            }
          }
        }
      }
    }
  }
  EXPECT_GT(num_refused, 0);
}

TEST(Pairs, OtherSchedulesRefuseThem) {
  const std::string text = message_of([] {
    build_schedule("zb_v", {.num_ranks = 2, .num_microbatches = 4, .pairs = Pairs::kWhole});
  });
  EXPECT_NE(text.find("choose one of 1f1b, interleaved_1f1b"), std::string::npos) << text;
}

}  // namespace
}  // namespace megacore::pipeline
