// The planner of the GPU, compiled for the CPU as a team of one thread, against plan_offload.

#include "megacore/moe/team_planner.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "megacore/moe/offload_plan.h"

namespace megacore::moe {
namespace {

struct Outputs {
  std::vector<int64_t> slot_expert;
  std::vector<int64_t> rerouted;
  std::vector<int64_t> load_before;
  std::vector<int64_t> load_after;
  TeamPlanSummary summary = {};
};

Outputs plan_by_team(const TokenCounts& counts, const PlanSpec& spec, int64_t num_runs) {
  const TeamSpec team_spec{
      .shape = {counts.num_ranks, counts.num_experts, spec.num_spare_slots},
      .is_balanced = spec.method == PlanMethod::kBalanced,
      .tolerance_per_million = spec.tolerance_per_million,
      .min_imbalance_per_million = spec.min_imbalance_per_million,
      .domain_size = spec.domain_size == 0 ? counts.num_ranks : spec.domain_size};
  constexpr int64_t kPoison = -0x5555555555555555;
  const auto slots = static_cast<size_t>(team_spec.shape.num_slots());
  const auto ranks = static_cast<size_t>(counts.num_ranks);
  Outputs out{.slot_expert = std::vector<int64_t>(slots, kPoison),
              .rerouted = std::vector<int64_t>(ranks * slots, kPoison),
              .load_before = std::vector<int64_t>(ranks, kPoison),
              .load_after = std::vector<int64_t>(ranks, kPoison)};
  std::vector<int64_t> words(static_cast<size_t>(PlanMemory::words(team_spec.shape, num_runs)),
                             kPoison);
  TeamPlanner<SoloTeam, SoloTeam>(SoloTeam{},
                                  SoloTeam{},
                                  team_spec,
                                  PlanMemory(words.data(), team_spec.shape, num_runs),
                                  counts.tokens,
                                  {.slot_expert = out.slot_expert.data(),
                                   .rerouted = out.rerouted.data(),
                                   .load_before = out.load_before.data(),
                                   .load_after = out.load_after.data(),
                                   .summary = &out.summary})
      .run();
  return out;
}

// Routings of all kinds: even, skewed, with empty experts and ranks, one expert for all.
std::vector<int64_t> random_counts(std::mt19937_64& random,
                                   int64_t num_ranks,
                                   int64_t num_experts) {
  const auto below = [&](uint64_t limit) { return static_cast<int64_t>(random() % limit); };
  const int64_t kind = below(6);
  const int64_t most = below(8) == 0 ? (int64_t{1} << 24) : 1 + below(300);
  const int64_t hot = below(static_cast<uint64_t>(num_experts));
  std::vector<int64_t> heat(static_cast<size_t>(num_experts));
  for (int64_t& value : heat) {
    value = kind == 0 ? most : below(static_cast<uint64_t>(most) + 1) / (1 + below(9));
  }
  std::vector<int64_t> counts;
  for (int64_t r = 0; r < num_ranks; ++r) {
    for (int64_t e = 0; e < num_experts; ++e) {
      int64_t count = below(static_cast<uint64_t>(heat[static_cast<size_t>(e)]) + 1);
      count = kind == 1 && e != hot ? 0 : count;
      count = kind == 2 && below(3) != 0 ? 0 : count;
      count = kind == 3 && e == hot ? count + most : count;
      counts.push_back(count);
    }
  }
  return counts;
}

PlanSpec random_spec(std::mt19937_64& random, int64_t num_ranks) {
  const auto below = [&](uint64_t limit) { return static_cast<int64_t>(random() % limit); };
  PlanSpec spec{.method = below(4) == 0 ? PlanMethod::kDocumented : PlanMethod::kBalanced,
                .num_spare_slots = below(5)};
  spec.tolerance_per_million = below(3) == 0 ? 0 : below(100'000);
  spec.min_imbalance_per_million = kMillion + (below(4) == 0 ? below(kMillion) : 0);
  if (spec.method == PlanMethod::kBalanced && below(3) == 0) {
    for (spec.domain_size = 1 + below(static_cast<uint64_t>(num_ranks));
         num_ranks % spec.domain_size != 0;
         --spec.domain_size) {
    }
  }
  return spec;
}

void expect_equal(const Outputs& found, const OffloadPlan& plan) {
  ASSERT_EQ(found.slot_expert, plan.slot_expert);
  ASSERT_EQ(found.rerouted, plan.rerouted);
  ASSERT_EQ(found.load_before, plan.load_before);
  ASSERT_EQ(found.load_after, plan.load_after);
  ASSERT_EQ(found.summary.max_load, plan.max_load);
  ASSERT_EQ(found.summary.num_clones, plan.num_clones);
  ASSERT_EQ(found.summary.bound, plan.bound);
  ASSERT_EQ(found.summary.bound_holds, plan.bound_holds ? 1 : 0);
  ASSERT_EQ(found.summary.is_valid, 1);
}

TEST(TeamPlanner, HasThePlanOfTheCpuForRandomInputs) {
  std::mt19937_64 random(1);
  int64_t num_clones = 0;
  for (int trial = 0; trial < 10000; ++trial) {
    const int64_t num_ranks = int64_t{1} + static_cast<int64_t>(random() % 12);
    const int64_t num_experts = num_ranks * (int64_t{1} + static_cast<int64_t>(random() % 6));
    const std::vector<int64_t> tokens = random_counts(random, num_ranks, num_experts);
    const TokenCounts counts{tokens.data(), num_ranks, num_experts};
    const PlanSpec spec = random_spec(random, num_ranks);
    SCOPED_TRACE(trial);
    const OffloadPlan plan = plan_offload(counts, spec);
    num_clones += plan.num_clones;
    expect_equal(plan_by_team(counts, spec, 1 + static_cast<int64_t>(random() % 33)), plan);
    if (HasFatalFailure()) {
      return;
    }
  }
  EXPECT_GT(num_clones, 20'000);
}

TEST(TeamPlanner, HasThePlanOfTheCpuForLargeGroups) {
  std::mt19937_64 random(2);
  for (int trial = 0; trial < 60; ++trial) {
    const int64_t num_ranks = trial % 2 == 0 ? 64 : 32;
    const int64_t num_experts = trial % 3 == 0 ? 512 : 256;
    const std::vector<int64_t> tokens = random_counts(random, num_ranks, num_experts);
    const TokenCounts counts{tokens.data(), num_ranks, num_experts};
    const PlanSpec spec = random_spec(random, num_ranks);
    SCOPED_TRACE(trial);
    expect_equal(plan_by_team(counts, spec, 16), plan_offload(counts, spec));
    if (HasFatalFailure()) {
      return;
    }
  }
}

TEST(TeamPlanner, MarksBadCountsAndMakesNoClones) {
  for (const int64_t bad : {int64_t{-1}, kMaxTokensPerExpert + 1, kMaxTokensPerExpert - 2}) {
    const std::vector<int64_t> tokens{bad, 5, 7, 100, 3, 3, 3, 3};
    const PlanSpec spec{.num_spare_slots = 2};
    const Outputs found = plan_by_team({tokens.data(), 2, 4}, spec, 4);
    EXPECT_EQ(found.summary.is_valid, 0);
    EXPECT_EQ(found.summary.bound_holds, 0);
    EXPECT_EQ(found.summary.num_clones, 0);
    EXPECT_EQ(found.slot_expert, (std::vector<int64_t>{-1, -1, -1, -1}));
    EXPECT_EQ(found.rerouted, std::vector<int64_t>(8, 0));
  }
}

}  // namespace
}  // namespace megacore::moe
