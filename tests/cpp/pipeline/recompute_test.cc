#include "megacore/pipeline/program/recompute.h"

#include <gtest/gtest.h>

#include <random>

#include "megacore/pipeline/schedules/generators.h"
#include "random_schedule.h"
#include "schedule_checks.h"

namespace megacore::pipeline {
namespace {

std::vector<Program> recomputing(std::vector<Program> programs, const Recompute& recompute) {
  for (Program& program : programs) program = add_recompute(std::move(program), recompute);
  return programs;
}

std::vector<Program> small(const Recompute& recompute) {
  return recomputing(lower(one_f_one_b({.num_ranks = 2, .num_microbatches = 3})), recompute);
}

// The forwards that keep no activations, each followed by a blank.
std::string dropped(const Program& program) {
  std::string text;
  for (const ProgramStep& step : program.steps) {
    if (step.drops_activations) text += to_text(step.action) + " ";
  }
  return text;
}

int occurrences(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(Recompute, StandsBeforeTheFirstBackwardThatReadsTheActivations) {
  EXPECT_EQ(to_text(small({.keep = 1})[0]),
            "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0RECOMPUTE1 "
            "0B1 0B2");
  const auto split = lower(zb_h1({.num_ranks = 2, .num_microbatches = 2}));
  EXPECT_EQ(to_text(recomputing(split, {})[1]),
            "1RECV_F0 1F0 1RECV_F1 1RECOMPUTE0 1I0 1SEND_B0 1F1 1RECOMPUTE1 1I1 1SEND_B1 1W0 1W1");
}

TEST(Recompute, KeepsTheFirstOfEveryWindow) {
  const auto with = [&](Recompute recompute) {
    const auto programs = small(recompute);
    EXPECT_NO_THROW(validate_programs(programs));
    return dropped(programs[0]);
  };
  EXPECT_EQ(with({.keep = 0}), "0F0 0F1 0F2 ");
  EXPECT_EQ(with({.keep = 1}), "0F1 ");  // rank 0 holds two at once
  EXPECT_EQ(with({.keep = 2}), "");
  EXPECT_EQ(with({.keep = 1, .window = 3}), "0F1 0F2 ");
  EXPECT_NE(message_of([&] { with({.keep = -1}); }).find("keep is -1"), std::string::npos);
}

TEST(Recompute, StandsBeforeThePairThatReadsTheActivations) {
  const auto programs = recomputing(lower(dualpipe_v({.num_ranks = 2, .num_microbatches = 4})), {});
  EXPECT_NO_THROW(validate_programs(programs));
  EXPECT_TRUE(mentions(to_text(programs[1]), "1RECV_F3 2RECV_B1 1RECOMPUTE0 2F2 1B0 2SEND_F2"));
}

// The evaluation form of a program is what its evaluation schedule lowers to.
TEST(Recompute, LeavesProgramsForEvaluationAsTheyAre) {
  for (const Receives receives : {Receives::kAhead, Receives::kInOrder}) {
    const Schedule schedule =
        interleaved_one_f_one_b({.num_ranks = 3, .num_chunks = 2, .num_microbatches = 7});
    const auto direct = lower(forward_only(schedule), receives);
    EXPECT_EQ(recomputing(direct, {}), direct);
    std::vector<Program> evaluation;
    for (const Program& program : recomputing(lower(schedule, receives), {})) {
      evaluation.push_back(forward_only(program));
    }
    EXPECT_NO_THROW(validate_programs(evaluation));
    EXPECT_EQ(evaluation, direct);
  }
}

// On random schedules: what is recomputed is proved, and each of it is there once.
TEST(Recompute, RandomSchedulesStayValid) {
  std::mt19937 random(19);
  const auto coin = [&] { return std::bernoulli_distribution(0.5)(random); };
  for (int round = 0; round < 300; ++round) {
    const Schedule schedule =
        random_schedule(random_placement(4, random),
                        std::uniform_int_distribution<int>(1, 4)(random), coin(), random);
    const auto programs =
        recomputing(lower(schedule, coin() ? Receives::kInOrder : Receives::kAhead,
                          std::uniform_int_distribution<int>(0, 3)(random)),
                    {.keep = coin() ? 1 : 0});
    ASSERT_NO_THROW(validate_programs(programs)) << to_text(schedule);
    for (const Program& program : programs) {
      EXPECT_EQ(occurrences(to_text(program), "RECOMPUTE"), occurrences(dropped(program), " "));
    }
  }
}

}  // namespace
}  // namespace megacore::pipeline
