#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "megacore/moe/offload_plan.h"
#include "megacore/moe/planner_math.h"
#include "plan_checker.h"

namespace megacore::moe {
namespace {

using testing::Random;
using testing::Routing;

// Tokens of experts, all sent by rank 0.
Routing routing_of(const std::vector<int64_t>& experts, int64_t num_ranks) {
  Routing routing{.num_ranks = num_ranks, .num_experts = static_cast<int64_t>(experts.size())};
  routing.tokens = experts;
  routing.tokens.resize(experts.size() * static_cast<size_t>(num_ranks), 0);
  return routing;
}

// The clones of a plan, by (rank, slot), with the tokens of each.
struct Clone {
  int64_t expert, rank, slot, tokens;
  friend bool operator==(const Clone&, const Clone&) = default;
};
std::vector<Clone> clones_of(const OffloadPlan& plan) {
  std::vector<Clone> clones;
  const auto num_slots = static_cast<size_t>(plan.num_spare_slots);
  for (size_t i = 0; i < plan.slot_expert.size(); ++i) {
    if (plan.slot_expert[i] >= 0) {
      int64_t tokens = 0;
      for (size_t source = 0; source < plan.load_before.size(); ++source) {
        tokens += plan.rerouted[source * plan.slot_expert.size() + i];
      }
      clones.push_back({plan.slot_expert[i], static_cast<int64_t>(i / num_slots),
                        static_cast<int64_t>(i % num_slots), tokens});
    }
  }
  return clones;
}

TEST(PlannerMath, GoalIsTheAverageRoundedUpOrWithTolerance) {
  EXPECT_EQ(goal_load(100, 4, 0), 25);
  EXPECT_EQ(goal_load(101, 4, 0), 26);
  EXPECT_EQ(goal_load(101, 4, 10'000), 26);
  EXPECT_EQ(goal_load(4000, 4, 10'000), 1010);
  EXPECT_EQ(goal_load(0, 4, 10'000), 0);
}

TEST(PlannerMath, ScaledAverageIsExactForTheLargestTotals) {
  const int64_t total = (int64_t{1} << 47) - 1;
  __extension__ using Wide = __int128;
  for (const int64_t per_million : {int64_t{1'000'000}, int64_t{1'010'000}, int64_t{999'999'937}}) {
    for (const int64_t num_ranks : {1, 3, 64}) {
      const Wide exact = Wide{total} * per_million / (Wide{kMillion} * num_ranks);
      EXPECT_EQ(scaled_average(total, num_ranks, per_million), static_cast<int64_t>(exact));
    }
  }
}

TEST(PlannerMath, KeysBreakTiesByTheLowestIndex) {
  EXPECT_GT(most_key(5, 9), most_key(4, 0));
  EXPECT_GT(most_key(5, 3), most_key(5, 4));
  EXPECT_EQ(index_of_most(most_key((int64_t{1} << 47) - 1, 65535)), 65535);
  EXPECT_LT(least_key(5, 3), least_key(5, 4));
  EXPECT_EQ(index_of_least(least_key(7, 12)), 12);
}

TEST(PlannerMath, ExpertKeyPrefersTheSmallestThatCoversElseTheLargest) {
  EXPECT_GT(expert_key(10, 10, 1), expert_key(11, 10, 0));
  EXPECT_GT(expert_key(11, 10, 1), expert_key(9, 10, 0));
  EXPECT_GT(expert_key(9, 10, 1), expert_key(8, 10, 0));
  EXPECT_GT(expert_key(kMaxTokensPerExpert, kMaxTokensPerExpert, 65535),
            expert_key(kMaxTokensPerExpert - 1, kMaxTokensPerExpert, 0));
  EXPECT_EQ(expert_key(0, 0, 0), 0U);
}

TEST(PlannerMath, BudgetDecidesWhetherATightFitMayWasteRoom) {
  const Receiver widest{.rank = 2, .slack = 90, .slots_left = 1};
  const Receiver tightest{.rank = 1, .slack = 60, .slots_left = 1};
  EXPECT_EQ(choose_move(Rule::kTightFit, 50, widest, tightest, 0).receiver, 1);
  EXPECT_EQ(choose_move(Rule::kBudgeted, 50, widest, tightest, 10).tokens, 50);
  EXPECT_EQ(choose_move(Rule::kBudgeted, 50, widest, tightest, 9).receiver, 2);
  EXPECT_EQ(choose_move(Rule::kBudgeted, 50, widest, tightest, 9).tokens, 90);
  EXPECT_EQ(choose_move(Rule::kTightFit, 95, widest, {}, 0).tokens, 90);
  EXPECT_EQ(choose_move(Rule::kWholeRank, 50, widest, {}, 0).tokens, 90);
}

TEST(PlannerMath, ScoresAreComparedFieldByField) {
  const Score score{.load = 5, .crossings = 5, .clones = 5, .sends = 5, .max_load = 5};
  EXPECT_FALSE(better(score, score));
  // Each worse in everything but its own field and those before it.
  EXPECT_TRUE(better({4, 9, 9, 9, 9}, score));
  EXPECT_TRUE(better({5, 4, 9, 9, 9}, score));
  EXPECT_TRUE(better({5, 5, 4, 9, 9}, score));
  EXPECT_TRUE(better({5, 5, 5, 4, 9}, score));
  EXPECT_TRUE(better({5, 5, 5, 5, 4}, score));
  EXPECT_FALSE(better(score, {5, 4, 9, 9, 9}));
  EXPECT_FALSE(better(score, {5, 5, 4, 9, 9}));
  EXPECT_FALSE(better(score, {5, 5, 5, 4, 9}));
}

TEST(PlannerMath, RefinedGoalsLieBetweenTheMissedAndTheReachedLoad) {
  for (const int64_t reached : {12, 13, 20, 100, 100'000}) {
    for (int64_t index = 0; index < kGoalsPerRound; ++index) {
      EXPECT_GT(refined_goal(10, reached, index), 10);
      EXPECT_LT(refined_goal(10, reached, index), reached);
    }
  }
}

TEST(Balanced, ADonorMayGiveMoreThanItsSurplusAndTakeOthers) {
  // With one slot a rank, loads 9 7 2 have one good plan: rank 0 fills rank 2 with 4 tokens, one
  // more than its surplus, and so has room for the token that rank 1 has too many.
  const Routing loads = routing_of({9, 7, 2}, 3);
  const OffloadPlan plan = plan_offload(
      loads.counts(), {.num_spare_slots = 1, .tolerance_per_million = 0, .domain_size = 3});
  EXPECT_EQ(clones_of(plan), (std::vector<Clone>{{1, 0, 0, 1}, {0, 2, 0, 4}}));
  EXPECT_EQ(plan.max_load, 6);
}

TEST(Balanced, ToleranceSavesClones) {
  const Routing loads = routing_of({1000, 990, 985, 1025}, 4);
  const PlanSpec exact{.num_spare_slots = 1, .tolerance_per_million = 0, .domain_size = 4};
  EXPECT_EQ(plan_offload(loads.counts(), exact).num_clones, 2);
  PlanSpec relaxed = exact;
  relaxed.tolerance_per_million = 10'000;
  EXPECT_EQ(plan_offload(loads.counts(), relaxed).num_clones, 1);
  relaxed.tolerance_per_million = 25'000;
  EXPECT_EQ(plan_offload(loads.counts(), relaxed).num_clones, 0);
}

TEST(Balanced, ClonesStayInTheirDomainWherePossible) {
  // Both halves have 160 tokens: each can settle itself, though the best fit is elsewhere.
  const Routing loads = routing_of({90, 30, 10, 30, 80, 60, 20, 0}, 8);
  PlanSpec spec{.num_spare_slots = 1, .tolerance_per_million = 0, .domain_size = 4};
  const OffloadPlan inside = plan_offload(loads.counts(), spec);
  EXPECT_EQ(inside.max_load, 40);
  const auto leaves = [](const Clone& clone) { return clone.expert / 4 != clone.rank / 4; };
  EXPECT_TRUE(std::ranges::none_of(clones_of(inside), leaves));
  spec.domain_size = 8;
  const OffloadPlan anywhere = plan_offload(loads.counts(), spec);
  EXPECT_TRUE(std::ranges::any_of(clones_of(anywhere), leaves));
  // A domain with too much for itself sends the rest out, and the goal is still reached.
  const Routing hot = routing_of({300, 100, 0, 0}, 4);
  EXPECT_EQ(plan_offload(hot.counts(),
                         {.num_spare_slots = 1, .tolerance_per_million = 0, .domain_size = 2})
                .max_load,
            100);
}

TEST(Balanced, UnavoidableImbalanceIsNearlyReached) {
  // A fraction f of the ranks holds L equally hot experts each: with b = k / L no planner can stay
  // below (f (1 + b) - b) / f^2 times the average.
  struct Case {
    int64_t num_ranks, experts_per_rank, slots, hot_ranks;
  };
  for (const Case& c : {Case{64, 4, 1, 26}, Case{64, 4, 2, 43}, Case{32, 8, 2, 13}}) {
    std::vector<int64_t> experts(static_cast<size_t>(c.num_ranks * c.experts_per_rank), 0);
    std::fill_n(experts.begin(), c.hot_ranks * c.experts_per_rank, 10'000);
    const Routing loads = routing_of(experts, c.num_ranks);
    const OffloadPlan plan = plan_offload(
        loads.counts(),
        {.num_spare_slots = c.slots, .tolerance_per_million = 0, .domain_size = c.num_ranks});
    const double f = static_cast<double>(c.hot_ranks) / static_cast<double>(c.num_ranks);
    const double b = static_cast<double>(c.slots) / static_cast<double>(c.experts_per_rank);
    const double limit = (f * (1 + b) - b) / (f * f);
    const double reached = static_cast<double>(plan.max_load) / static_cast<double>(plan.bound);
    EXPECT_GE(reached, limit * 0.9999);
    EXPECT_LE(reached, limit * 1.01);
  }
}

// The least highest load that any choice of clones allows, by trying all of them. For given hosts
// of every expert, a load M is possible if no set of ranks holds more than M per rank of tokens
// that can go nowhere else (max-flow min-cut).
class BruteForce {
 public:
  BruteForce(const Routing& routing, int64_t num_spare_slots)
      : experts_(routing.tokens.begin(), routing.tokens.begin() + routing.num_experts),
        num_ranks_(static_cast<size_t>(routing.num_ranks)) {
    for (size_t e = 0; e < experts_.size(); ++e) {
      hosts_.push_back(1U << (e / (experts_.size() / num_ranks_)));
    }
    best_ = sum_loads(routing.counts()).highest();
    choose(0, num_spare_slots, 0, num_spare_slots);
  }
  int64_t best() const { return best_; }

 private:
  // Fills the slots from rank `rank` on, with experts of ascending index from `first`.
  void choose(size_t rank, int64_t slots_left, size_t first, int64_t slots) {
    if (rank == num_ranks_) {
      best_ = std::min(best_, least_load());
      return;
    }
    choose(rank + 1, slots, 0, slots);
    for (size_t e = first; slots_left > 0 && e < hosts_.size(); ++e) {
      if ((hosts_[e] & (1U << rank)) == 0) {
        hosts_[e] ^= 1U << rank;
        choose(rank, slots_left - 1, e + 1, slots);
        hosts_[e] ^= 1U << rank;
      }
    }
  }

  int64_t least_load() const {
    int64_t least = 0;
    for (uint32_t ranks = 1; ranks < (1U << num_ranks_); ++ranks) {
      int64_t bound_tokens = 0;
      for (size_t e = 0; e < hosts_.size(); ++e) {
        bound_tokens += (hosts_[e] & ~ranks) == 0 ? experts_[e] : 0;
      }
      const int64_t size = __builtin_popcount(ranks);
      least = std::max(least, (bound_tokens + size - 1) / size);
    }
    return least;
  }

  std::vector<int64_t> experts_;  // tokens
  size_t num_ranks_;
  std::vector<uint32_t> hosts_;  // bit set of ranks, per expert
  int64_t best_ = 0;
};

TEST(Balanced, NearTheOptimumOfExhaustiveSearch) {
  Random random(7);
  double sum_of_ratios = 0.0;
  double worst = 0.0;
  constexpr int kCases = 300;
  for (int i = 0; i < kCases; ++i) {
    const int64_t num_ranks = random.between(3, 4);
    const int64_t experts_per_rank = num_ranks == 3 ? random.between(2, 3) : 2;
    const int64_t slots = num_ranks == 3 && random.one_in(3) ? 2 : 1;
    std::vector<int64_t> experts;
    for (int64_t e = 0; e < num_ranks * experts_per_rank; ++e) {
      const int64_t size = random.between(0, 10);
      experts.push_back(random.between(0, int64_t{1} << size));
    }
    const Routing loads = routing_of(experts, num_ranks);
    const int64_t best = BruteForce(loads, slots).best();
    const OffloadPlan plan = plan_offload(
        loads.counts(),
        {.num_spare_slots = slots, .tolerance_per_million = 0, .domain_size = num_ranks});
    ASSERT_GE(plan.max_load, best);
    const double ratio =
        best == 0 ? 1.0 : static_cast<double>(plan.max_load) / static_cast<double>(best);
    sum_of_ratios += ratio;
    worst = std::max(worst, ratio);
  }
  EXPECT_LE(sum_of_ratios / kCases, 1.001);
  EXPECT_LE(worst, 1.05);
}

}  // namespace
}  // namespace megacore::moe
