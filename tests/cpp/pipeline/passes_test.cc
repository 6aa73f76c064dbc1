#include "megacore/pipeline/program/passes.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <random>

#include "megacore/pipeline/schedules/generators.h"
#include "random_schedule.h"
#include "schedule_checks.h"

namespace megacore::pipeline {
namespace {

constexpr LoweringOptions kCommunication{
    .parameter_sync = false, .releases = false, .slots = std::nullopt};

std::vector<Program> small(const LoweringOptions& options) {
  return lower(one_f_one_b({.num_ranks = 2, .num_microbatches = 3}), options);
}

int occurrences(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(Passes, GoldenTextOfTheThreeLevels) {
  const Program program = small({.recompute = Recompute{.keep = 1}})[0];
  EXPECT_EQ(to_text(program, ProgramLevel::kCompute), "0F0 0F1 0B0 0F2 0B1 0B2");
  EXPECT_EQ(to_text(program, ProgramLevel::kData),
            "0GATHER_PARAMS 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RELEASE0 0RECV_B1 0F2 "
            "0SEND_F2 0RECV_B2 0RECOMPUTE1 0B1 0RELEASE1 0B2 0RELEASE2 0REDUCE_GRADS");
  EXPECT_EQ(to_text(program, ProgramLevel::kResources),
            "0GATHER_PARAMS 0F0[0] 0SEND_F0->1#0 0RECV_B0<-1#0[0] 0F1[1,dropped] 0SEND_F1->1#1 "
            "0B0[0] 0RELEASE0[0] 0RECV_B1<-1#1[0] 0F2[0] 0SEND_F2->1#2 0RECV_B2<-1#2[1] "
            "0RECOMPUTE1[1] 0B1[1] 0RELEASE1[1] 0B2[0] 0RELEASE2[0] 0REDUCE_GRADS");
}

TEST(Passes, ASplitBackwardReleasesAndReducesBehindItsWeights) {
  const auto programs = lower(zb_h1({.num_ranks = 2, .num_microbatches = 2}), LoweringOptions{});
  EXPECT_EQ(to_text(programs[1], ProgramLevel::kResources),
            "1GATHER_PARAMS 1RECV_F0<-0#0[0] 1F0[0] 1RECV_F1<-0#1[0] 1I0[0] 1SEND_B0->0#0 1F1[1] "
            "1I1[1] 1SEND_B1->0#1 1W0[0] 1RELEASE0[0] 1W1[1] 1RELEASE1[1] 1REDUCE_GRADS");
}

TEST(Passes, BatchesHoldTheTransfersBetweenTwoComputeActions) {
  LoweringOptions options = kCommunication;
  options.receives = Receives::kInOrder;
  options.batches = true;
  const auto programs = small(options);
  EXPECT_EQ(to_text(programs[1], ProgramLevel::kResources),
            "1RECV_F0<-0#0 1F0 1RECV_F1<-0#1 1B0 1SEND_B0->0#0 1F1 1B1 "
            "{1RECV_F2<-0#2 1SEND_B1->0#1} 1F2 1B2 1SEND_B2->0#2");
  EXPECT_NO_THROW(validate_programs(programs));
}

// Both ends of a pair that overlaps: receives before it, sends behind it.
TEST(Passes, PairsThatOverlapStayTogether) {
  const auto schedule = dualpipe_v({.num_ranks = 2, .num_microbatches = 4});
  const std::string text = to_text(lower(schedule, kCommunication)[1], ProgramLevel::kResources);
  EXPECT_NE(text.find("1RECV_F3<-0#4 2RECV_B1<-0#5 (2F2;1B0)OVERLAP_F_B 2SEND_F2->0#2 "
                      "1SEND_B0->0#3 (1F3;2B1)OVERLAP_F_B"),
            std::string::npos)
      << text;
  for (const Receives receives : {Receives::kAhead, Receives::kInOrder}) {
    for (const int ahead : {0, 1, 3}) {
      std::vector<Program> programs = lower(schedule, receives, ahead);
      EXPECT_NO_THROW(validate_programs(programs));
      size_t num_pairs = 0;
      for (const Program& program : programs) {
        for (const ProgramStep& step : program.steps) num_pairs += step.starts_pair ? 1 : 0;
      }
      EXPECT_EQ(num_pairs, schedule.overlaps.size());
    }
  }
}

TEST(Passes, ReceivesStandAsFarAheadAsAsked) {
  const Schedule schedule = gpipe({.num_ranks = 2, .num_microbatches = 4});
  EXPECT_EQ(to_text(lower(schedule, Receives::kAhead, 0)[1]).substr(0, 35),
            "1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 ");
  EXPECT_EQ(to_text(lower(schedule, Receives::kAhead, 2)[1]).substr(0, 40),
            "1RECV_F0 1RECV_F1 1RECV_F2 1F0 1RECV_F3 ");
  EXPECT_EQ(message_of([&] { lower(schedule, Receives::kAhead, -1); }).substr(0, 11),
            "ahead is -1");
}

TEST(Passes, RecomputeKeepsTheFirstOfEveryWindow) {
  const auto dropped = [](const Program& program) {
    std::string text;
    for (const ProgramStep& step : program.steps) {
      if (step.drops_activations) text += to_text(step.action) + " ";
    }
    return text;
  };
  const auto with = [&](Recompute recompute) {
    const auto programs = small({.recompute = recompute});
    EXPECT_NO_THROW(validate_programs(programs));
    return dropped(programs[0]);
  };
  EXPECT_EQ(with({.keep = 0}), "0F0 0F1 0F2 ");
  EXPECT_EQ(with({.keep = 1}), "0F1 ");  // rank 0 holds two at once
  EXPECT_EQ(with({.keep = 2}), "");
  EXPECT_EQ(with({.keep = 1, .window = 3}), "0F1 0F2 ");
  EXPECT_NE(message_of([&] { with({.keep = -1}); }).find("keep is -1"), std::string::npos);
}

TEST(Passes, WhatDoesNotFitIsRefused) {
  EXPECT_NE(message_of([] { small({.batches = true}); }).find("are posted ahead"),
            std::string::npos);
  EXPECT_NE(message_of([] { count_slots(small(kCommunication)[0]); }).find("has no slots"),
            std::string::npos);
}

// The evaluation form of a lowered program is what its evaluation schedule lowers to.
TEST(Passes, ForwardOnlyRepeatsThem) {
  for (const Receives receives : {Receives::kAhead, Receives::kInOrder}) {
    const Schedule schedule =
        interleaved_one_f_one_b({.num_ranks = 3, .num_chunks = 2, .num_microbatches = 7});
    const LoweringOptions options{.receives = receives, .recompute = Recompute{}};
    std::vector<Program> evaluation;
    for (const Program& program : lower(schedule, options)) {
      evaluation.push_back(forward_only(program));
    }
    EXPECT_NO_THROW(validate_programs(evaluation));
    const auto direct = lower(forward_only(schedule), {.receives = receives});
    for (size_t rank = 0; rank < direct.size(); ++rank) {
      EXPECT_EQ(to_text(evaluation[rank], ProgramLevel::kResources),
                to_text(direct[rank], ProgramLevel::kResources));
    }
  }
}

// All passes on random schedules: whatever is added is proved, and each of it is there once.
TEST(Passes, RandomSchedulesStayValid) {
  std::mt19937 random(19);
  const auto coin = [&] { return std::bernoulli_distribution(0.5)(random); };
  for (int round = 0; round < 300; ++round) {
    const Schedule schedule = random_schedule(random_placement(4, random),
                                              std::uniform_int_distribution<int>(1, 4)(random),
                                              coin(),
                                              random);
    const bool in_order = coin();
    const auto programs = lower(
        schedule,
        {.receives = in_order ? Receives::kInOrder : Receives::kAhead,
         .ahead = std::uniform_int_distribution<int>(0, 3)(random),
         .recompute = coin() ? std::optional(Recompute{.keep = coin() ? 1 : 0}) : std::nullopt,
         .batches = in_order && coin(),
         .slots = coin() ? SlotPools::kShared : SlotPools::kPerChunk});
    ASSERT_NO_THROW(validate_programs(programs)) << to_text(schedule);
    for (const Program& program : programs) {
      const std::string text = to_text(program);
      const auto stages = static_cast<int>(program.placement.stages_of(program.rank).size());
      EXPECT_EQ(occurrences(text, "GATHER_PARAMS"), stages);
      EXPECT_EQ(occurrences(text, "REDUCE_GRADS"), stages);
      EXPECT_EQ(occurrences(text, "RELEASE"), stages * schedule.num_microbatches);
    }
  }
}

// ---- slots: closed forms, and an oracle that knows nothing of pools -----------------------------

// First and last use of every activation of one rank, read off its compute actions.
struct Lifetime {
  int stage;
  size_t first;
  size_t last;
};

std::vector<Lifetime> lifetimes(std::span<const Action> actions) {
  std::map<std::pair<int, int>, Lifetime> found;
  for (size_t i = 0; i < actions.size(); ++i) {
    const Action& action = actions[i];
    const auto at = std::pair(action.stage, action.microbatch);
    found.try_emplace(at, Lifetime{action.stage, i, i}).first->second.last = i;
  }
  std::vector<Lifetime> result;
  for (const auto& [at, lifetime] : found) result.push_back(lifetime);
  return result;
}

// The most lifetimes that contain one instant; `stage` -1 counts all stages.
int most_at_once(const std::vector<Lifetime>& lifetimes, int stage) {
  int most = 0;
  for (const Lifetime& now : lifetimes) {
    const auto holds = [&](const Lifetime& other) {
      return (stage < 0 || other.stage == stage) && other.first <= now.first &&
             now.first < other.last;
    };
    most =
        std::max(most, static_cast<int>(std::count_if(lifetimes.begin(), lifetimes.end(), holds)));
  }
  return most;
}

int total(const std::vector<int32_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), 0);
}

SlotCounts slots_of(const Schedule& schedule, int rank, SlotPools pools) {
  LoweringOptions options;
  options.slots = pools;
  return count_slots(lower(schedule, options)[static_cast<size_t>(rank)]);
}

TEST(Slots, InterleavedClosedFormAndOracle) {
  for (const int p : {1, 2, 3, 4, 6}) {
    for (const int v : {1, 2, 3}) {
      for (const int m : {p, p + 1, 2 * p, 3 * p + 1}) {
        for (const int group : {p, p + 1, m}) {
          if (group > m || (m % group != 0 && m % group < p)) continue;
          const Schedule schedule = v == 1 ? one_f_one_b({.num_ranks = p, .num_microbatches = m})
                                           : interleaved_one_f_one_b({.num_ranks = p,
                                                                      .num_chunks = v,
                                                                      .num_microbatches = m,
                                                                      .group_size = group});
          const auto shared = lower(schedule, {.slots = SlotPools::kShared});
          const auto rings = lower(schedule, {.slots = SlotPools::kPerChunk});
          for (int r = 0; r < p; ++r) {
            const auto rank = static_cast<size_t>(r);
            const int form = v == 1 ? std::min(m, p - r)
                                    : std::min(m * v, 2 * (p - 1 - r) + (v - 1) * group + 1);
            EXPECT_EQ(total(count_slots(shared[rank]).activations), form);
            const auto used = lifetimes(schedule.rank_actions(r));
            EXPECT_EQ(form, most_at_once(used, -1));
            const SlotCounts counts = count_slots(rings[rank]);
            for (int chunk = 0; chunk < v; ++chunk) {
              EXPECT_EQ(counts.activations[static_cast<size_t>(chunk)],
                        most_at_once(used, chunk * p + r));
            }
            EXPECT_EQ(counts.graph_pairs, total(counts.activations));
          }
        }
      }
    }
  }
}

TEST(Slots, GraphPairsAreTheSumOfPeaksWhateverTheMicrobatches) {
  const auto interleaved = [](int p, int v, int m) {
    return interleaved_one_f_one_b(
        {.num_ranks = p, .num_chunks = v, .num_microbatches = m, .group_size = p});
  };
  for (const int m : {16, 64, 128}) {
    EXPECT_EQ(slots_of(interleaved(4, 2, m), 0, SlotPools::kPerChunk).graph_pairs, 12);
    EXPECT_EQ(total(slots_of(interleaved(4, 2, m), 0, SlotPools::kShared).activations), 11);
  }
  EXPECT_EQ(slots_of(interleaved(8, 4, 64), 0, SlotPools::kPerChunk).graph_pairs, 48);
  EXPECT_EQ(slots_of(interleaved(4, 2, 64), 0, SlotPools::kShared).graph_pairs, 22);
  EXPECT_EQ(slots_of(interleaved(8, 4, 64), 0, SlotPools::kShared).graph_pairs, 93);
}

// A ring: microbatch j of a chunk is in slot j modulo their number, for schedules that free them in
// order.
TEST(Slots, AChunkGoesRoundItsRing) {
  const Schedule schedule = interleaved_one_f_one_b(
      {.num_ranks = 4, .num_chunks = 2, .num_microbatches = 32, .group_size = 4});
  for (const Program& program : lower(schedule, LoweringOptions{})) {
    const SlotCounts counts = count_slots(program);
    for (const ProgramStep& step : program.steps) {
      if (step.action.kind != ActionKind::kForward) continue;
      const auto chunk = static_cast<size_t>(program.placement.chunk_of(step.action.stage));
      EXPECT_EQ(step.slot, step.action.microbatch % counts.activations[chunk]);
    }
  }
}

// No slot is used again before the last action that reads it, W included; and there are no more
// than are in use at once.
TEST(Slots, RandomSchedulesNeverReuseASlotEarly) {
  std::mt19937 random(23);
  for (int round = 0; round < 300; ++round) {
    const Schedule schedule = random_schedule(random_placement(3, random),
                                              std::uniform_int_distribution<int>(1, 5)(random),
                                              round % 2 == 0,
                                              random);
    for (const Program& program : lower(schedule, {.slots = SlotPools::kShared})) {
      std::map<int, std::pair<int, int>> user;  // by slot: who read it last
      std::map<std::pair<int, int>, int> reads_left;
      for (const ProgramStep& step : program.steps) {
        if (is_compute(step.action.kind)) ++reads_left[{step.action.stage, step.action.microbatch}];
      }
      for (const ProgramStep& step : program.steps) {
        if (!is_compute(step.action.kind)) continue;
        const auto me = std::pair(step.action.stage, step.action.microbatch);
        const auto before = user.find(step.slot);
        if (before != user.end() && before->second != me) {
          ASSERT_EQ(reads_left[before->second], 0);
        }
        user[step.slot] = me;
        --reads_left[me];
      }
      EXPECT_EQ(count_slots(program).activations.front(),
                most_at_once(lifetimes(schedule.rank_actions(program.rank)), -1));
    }
  }
}

}  // namespace
}  // namespace megacore::pipeline
