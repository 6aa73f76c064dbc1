#include "megacore/moe/offload_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "plan_checker.h"

namespace megacore::moe {
namespace {

using testing::PlanChecker;
using testing::Random;
using testing::Routing;

constexpr int64_t kLargestCount = int64_t{1} << 24;

enum Kind { kUniform, kTies, kSparse, kOneHot, kSkewed, kHotRanks, kHuge, kZero, kNumKinds };

// One of several kinds of counts, from even to as uneven as possible.
Routing random_routing(Random& random, int64_t num_ranks, int64_t experts_per_rank) {
  Routing routing{.num_ranks = num_ranks, .num_experts = num_ranks * experts_per_rank};
  const int64_t kind = random.between(0, kNumKinds - 1);
  const int64_t hot_expert = random.between(0, routing.num_experts - 1);
  const int64_t hot_ranks = random.between(1, num_ranks);
  std::vector<int64_t> popularity;
  for (int64_t e = 0; e < routing.num_experts; ++e) {
    popularity.push_back(random.between(0, int64_t{1} << random.between(0, 12)));
  }
  for (int64_t r = 0; r < num_ranks; ++r) {
    for (int64_t e = 0; e < routing.num_experts; ++e) {
      int64_t count = 0;
      switch (kind) {
        case kUniform:
          count = random.between(0, 1000);
          break;
        case kTies:
          count = random.between(0, 2);
          break;
        case kSparse:
          count = random.one_in(8) ? random.between(0, 50) : 0;
          break;
        case kOneHot:
          count = e == hot_expert ? random.between(0, kLargestCount) : 0;
          break;
        case kSkewed:
          count = random.between(0, popularity[static_cast<size_t>(e)]);
          break;
        case kHotRanks:
          count = e / experts_per_rank < hot_ranks ? 100 : 0;
          break;
        case kHuge:
          count = random.one_in(3) ? kLargestCount : random.between(0, kLargestCount);
          break;
        default:
          break;
      }
      routing.tokens.push_back(count);
    }
  }
  return routing;
}

PlanSpec random_spec(Random& random, int64_t num_ranks) {
  const bool documented = random.one_in(4);
  PlanSpec spec{.method = documented ? PlanMethod::kEcho : PlanMethod::kBalanced,
                .num_spare_slots = random.one_in(20) ? 0 : random.between(1, 8)};
  const std::vector<int64_t> tolerances{0, 0, 10'000, 50'000, 1'000'000};
  spec.tolerance_per_million = tolerances[static_cast<size_t>(random.between(0, 4))];
  spec.min_imbalance_per_million = random.one_in(5) ? 1'300'000 : kMillion;
  const int64_t domain = random.between(1, num_ranks);
  if (!documented && random.one_in(3) && num_ranks % domain == 0) {
    spec.domain_size = domain;
  }
  return spec;
}

std::string describe(const Routing& routing, const PlanSpec& spec) {
  return "method " + std::to_string(static_cast<int>(spec.method)) + " slots " +
         std::to_string(spec.num_spare_slots) + " tolerance " +
         std::to_string(spec.tolerance_per_million) + " domain " +
         std::to_string(spec.domain_size) + " counts " + routing.to_text();
}

void check(const Routing& routing, const PlanSpec& spec) {
  const OffloadPlan plan = plan_offload(routing.counts(), spec);
  const std::string violation = PlanChecker(routing, spec, plan).first_violation();
  ASSERT_TRUE(violation.empty()) << violation << "\n" << describe(routing, spec);
}

TEST(OffloadPlan, HundredThousandSmallInputsKeepEveryPromise) {
  Random random(20'240'601);
  for (int i = 0; i < 100'000; ++i) {
    const int64_t num_ranks = random.between(1, 6);
    const Routing routing = random_routing(random, num_ranks, random.between(1, 5));
    ASSERT_NO_FATAL_FAILURE(check(routing, random_spec(random, num_ranks)));
  }
}

TEST(OffloadPlan, TheCheckerFindsPlantedMistakes) {
  const Routing routing{.num_ranks = 2, .num_experts = 4, .tokens = {9, 9, 1, 1, 9, 9, 1, 1}};
  const PlanSpec spec{.num_spare_slots = 2, .tolerance_per_million = 0};
  const OffloadPlan plan = plan_offload(routing.counts(), spec);
  const auto violation = [&](auto&& spoil) {
    OffloadPlan spoiled = plan;
    spoil(spoiled);
    return PlanChecker(routing, spec, spoiled).first_violation();
  };
  EXPECT_EQ(violation([](OffloadPlan&) {}), "");
  EXPECT_NE(violation([](OffloadPlan& p) { p.slot_expert[3] = p.slot_expert[2]; }), "");
  EXPECT_NE(violation([](OffloadPlan& p) { p.slot_expert[0] = 0; }), "");
  EXPECT_NE(violation([](OffloadPlan& p) { ++p.rerouted[2]; }), "");
  EXPECT_NE(violation([](OffloadPlan& p) { std::swap(p.rerouted[2], p.rerouted[6]); }), "");
  EXPECT_NE(violation([](OffloadPlan& p) { p.load_after[0] += 1; }), "");
  EXPECT_NE(violation([](OffloadPlan& p) { p.bound -= 1; }), "");
  EXPECT_NE(violation([](OffloadPlan& p) { p.bound_holds = false; }), "");
}

TEST(OffloadPlan, LargeInputsKeepEveryPromise) {
  Random random(5);
  for (int i = 0; i < 150; ++i) {
    const int64_t num_ranks = random.between(1, 64);
    const Routing routing = random_routing(
        random, num_ranks, random.between(1, std::min<int64_t>(512 / num_ranks, 64)));
    ASSERT_NO_FATAL_FAILURE(check(routing, random_spec(random, num_ranks)));
  }
}

TEST(OffloadPlan, AsManySlotsAsExpertsMeetTheAverageExactly) {
  Random random(11);
  for (int i = 0; i < 3000; ++i) {
    const int64_t num_ranks = random.between(1, 12);
    const int64_t experts_per_rank = random.between(1, 6);
    const Routing routing = random_routing(random, num_ranks, experts_per_rank);
    PlanSpec spec{.num_spare_slots = experts_per_rank, .tolerance_per_million = 0};
    spec.domain_size = random.one_in(2) && num_ranks % 3 == 0 ? 3 : 0;
    const OffloadPlan plan = plan_offload(routing.counts(), spec);
    int64_t total = 0;
    for (const int64_t count : routing.tokens) {
      total += count;
    }
    ASSERT_LE(plan.max_load, (total + num_ranks - 1) / num_ranks) << describe(routing, spec);
  }
}

TEST(OffloadPlan, IsAFunctionOfItsArguments) {
  Random random(3);
  const Routing routing = random_routing(random, 16, 4);
  const PlanSpec spec{.num_spare_slots = 2};
  const OffloadPlan first = plan_offload(routing.counts(), spec);
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(plan_offload(routing.counts(), spec), first);
  }
}

uint64_t fold(uint64_t digest, const std::vector<int64_t>& values) {
  for (const int64_t value : values) {
    digest = (digest ^ static_cast<uint64_t>(value)) * 0x100000001b3ULL;
  }
  return digest;
}

TEST(OffloadPlan, IsTheSameOnEveryMachine) {
  // Ranks may run on different processors; a change of this number is a change of plans.
  Random random(99);
  uint64_t digest = 0xcbf29ce484222325ULL;
  for (int i = 0; i < 2000; ++i) {
    const int64_t num_ranks = i < 50 ? 64 : random.between(1, 8);
    const Routing routing = random_routing(random, num_ranks, random.between(1, 6));
    const OffloadPlan plan = plan_offload(routing.counts(), random_spec(random, num_ranks));
    digest = fold(fold(digest, plan.slot_expert), plan.rerouted);
  }
  EXPECT_EQ(digest, 7845647208018117891U);
}

TEST(OffloadPlan, SmallImbalanceIsLeftAlone) {
  const Routing routing{.num_ranks = 2, .num_experts = 2, .tokens = {60, 40, 60, 40}};
  const PlanSpec eager{.num_spare_slots = 1, .tolerance_per_million = 0};
  EXPECT_EQ(plan_offload(routing.counts(), eager).num_clones, 1);
  PlanSpec lazy = eager;
  lazy.min_imbalance_per_million = 1'200'000;
  const OffloadPlan plan = plan_offload(routing.counts(), lazy);
  EXPECT_EQ(plan.num_clones, 0);
  EXPECT_EQ(plan.bound, 120);
  EXPECT_TRUE(plan.bound_holds);
}

std::string message_of(const Routing& routing, const PlanSpec& spec) {
  try {
    plan_offload(routing.counts(), spec);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(OffloadPlan, MistakesAreNamedWithTheirPlace) {
  const Routing good{.num_ranks = 2, .num_experts = 2, .tokens = {1, 2, 3, 4}};
  const auto says = [](const std::string& message, const std::string& part) {
    return message.find(part) != std::string::npos;
  };
  EXPECT_TRUE(says(message_of({2, 2, {1, 2, 3, -4}}, {}), "rank 1 for expert 1 is -4"));
  EXPECT_TRUE(says(message_of({2, 3, {1, 2, 3, 4, 5, 6}}, {}), "are 2 or 4"));
  EXPECT_TRUE(says(message_of({1, 1, {kMaxTokensPerExpert + 1}}, {}), "more than 2147483647"));
  EXPECT_TRUE(says(message_of({2, 2, {kMaxTokensPerExpert, 0, 1, 0}}, {}), "more than 2147483647"));
  EXPECT_TRUE(says(message_of({1, 1, {INT64_MAX}}, {}), "more than 2147483647"));
  EXPECT_TRUE(says(message_of(good, {.num_spare_slots = -1}),
                   "num_spare_slots must be in [0, 1024], got -1"));
  EXPECT_TRUE(says(message_of(good, {.tolerance_per_million = -1}), "tolerance is -1"));
  EXPECT_TRUE(says(message_of(good, {.min_imbalance_per_million = 1}), "minimum imbalance is 1"));
  EXPECT_TRUE(says(message_of(good, {.domain_size = 3}), "must divide the number of ranks, 2"));
  EXPECT_TRUE(says(message_of(good, {.method = PlanMethod::kEcho, .domain_size = 2}),
                   "only the balanced planner"));
  EXPECT_THROW(plan_method("eplb"), std::invalid_argument);
}

}  // namespace
}  // namespace megacore::moe
