// The planner with a team of many threads, as a GPU has it, against plan_offload.

#include "megacore/moe/team_planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <cstdint>
#include <deque>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "megacore/moe/offload_plan.h"

namespace megacore::moe {
namespace {

// A team of threads of the host, in lockstep where the planner synchronizes: what a block of a GPU
// is, with warps of kLanes lanes.
constexpr int kLanes = 4;
constexpr int kWarps = 3;

class HostWarp {
 public:
  HostWarp(std::barrier<>& barrier, std::array<int64_t, kLanes>& shared, int lane)
      : barrier_(&barrier), shared_(&shared), lane_(lane) {}

  int lane() const { return lane_; }
  int lanes() const { return kLanes; }
  uint64_t max(uint64_t value) const {
    return reduce(value, [](uint64_t a, uint64_t b) { return std::max(a, b); });
  }
  uint64_t min(uint64_t value) const {
    return reduce(value, [](uint64_t a, uint64_t b) { return std::min(a, b); });
  }
  int64_t sum(int64_t value) const {
    return reduce(value, [](int64_t a, int64_t b) { return a + b; });
  }
  int64_t before(bool flag, int64_t& total) const { return sum_before(flag ? 1 : 0, total); }
  int64_t sum_before(int64_t value, int64_t& total) const {
    const std::array<int64_t, kLanes> all = exchange(value);
    total = std::accumulate(all.begin(), all.end(), int64_t{0});
    return std::accumulate(all.begin(), all.begin() + lane_, int64_t{0});
  }
  void sync() const { barrier_->arrive_and_wait(); }

 private:
  std::array<int64_t, kLanes> exchange(int64_t value) const {
    (*shared_)[static_cast<size_t>(lane_)] = value;
    sync();
    const std::array<int64_t, kLanes> all = *shared_;
    sync();
    return all;
  }
  template <typename T, typename Combine>
  T reduce(T value, const Combine& combine) const {
    const std::array<int64_t, kLanes> all = exchange(static_cast<int64_t>(value));
    T result = static_cast<T>(all[0]);
    for (size_t i = 1; i < kLanes; ++i) {
      result = combine(result, static_cast<T>(all[i]));
    }
    return result;
  }

  std::barrier<>* barrier_;
  std::array<int64_t, kLanes>* shared_;
  int lane_;
};

class HostTeam {
 public:
  HostTeam(std::barrier<>& barrier, int thread) : barrier_(&barrier), thread_(thread) {}
  int thread() const { return thread_; }
  int threads() const { return kWarps * kLanes; }
  int warp() const { return thread_ / kLanes; }
  int warps() const { return kWarps; }
  void sync() const { barrier_->arrive_and_wait(); }

 private:
  std::barrier<>* barrier_;
  int thread_;
};

// The plan of one rank, in memory that was not cleared before.
struct PlanOfRank {
  static constexpr int64_t kPoison = -0x5555555555555555;

  PlanOfRank(const PlanShape& shape)
      : slot_expert(size(shape.num_slots()), kPoison),
        sent(size(shape.num_slots()), kPoison),
        arriving(size(shape.num_ranks * shape.places_per_rank()), kPoison),
        load_before(size(shape.num_ranks), kPoison),
        load_after(size(shape.num_ranks), kPoison) {}

  static size_t size(int64_t number) { return static_cast<size_t>(number); }

  RankPlan arrays(int64_t rank) {
    return {.rank = rank,
            .slot_expert = slot_expert.data(),
            .sent = sent.data(),
            .arriving = arriving.data(),
            .load_before = load_before.data(),
            .load_after = load_after.data(),
            .summary = &summary};
  }

  std::vector<int64_t> slot_expert, sent, arriving, load_before, load_after;
  PlanSummary summary = {};

  friend bool operator==(const PlanOfRank&, const PlanOfRank&) = default;
};

PlanShape shape_of(const TokenCounts& counts, const PlanSpec& spec) {
  return {counts.num_ranks, counts.num_experts, spec.num_spare_slots};
}

PlanOfRank plan_by_team(const TokenCounts& counts,
                        const PlanSpec& spec,
                        int64_t rank,
                        int64_t num_runs) {
  const PlanShape shape = shape_of(counts, spec);
  PlanOfRank out(shape);
  std::vector<int64_t> words(PlanOfRank::size(PlanMemory::words(shape, num_runs)),
                             PlanOfRank::kPoison);
  const RankPlan plan = out.arrays(rank);
  std::barrier<> all(kWarps * kLanes);
  std::deque<std::barrier<>> barriers;
  std::array<std::array<int64_t, kLanes>, kWarps> shared{};
  for (int warp = 0; warp < kWarps; ++warp) {
    barriers.emplace_back(kLanes);
  }
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < kWarps * kLanes; ++thread) {
      threads.emplace_back([&, thread] {
        const auto warp = static_cast<size_t>(thread / kLanes);
        TeamPlanner<HostTeam, HostWarp>(
            HostTeam(all, thread), HostWarp(barriers[warp], shared[warp], thread % kLanes), shape,
            spec, PlanMemory(words.data(), shape, num_runs), counts.tokens, plan)
            .run();
      });
    }
  }
  return out;
}

PlanOfRank plan_by_one_thread(const TokenCounts& counts, const PlanSpec& spec, int64_t rank) {
  PlanOfRank out(shape_of(counts, spec));
  plan_offload_of_rank(counts, spec, out.arrays(rank));
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
  PlanSpec spec{.method = below(4) == 0 ? PlanMethod::kEcho : PlanMethod::kBalanced,
                .num_spare_slots = below(5)};
  spec.tolerance_per_million = below(3) == 0 ? 0 : below(100'000);
  spec.min_imbalance_per_million = kMillion + (below(4) == 0 ? below(kMillion) : 0);
  if (spec.method == PlanMethod::kBalanced && below(3) == 0) {
    for (spec.domain_size = 1 + below(static_cast<uint64_t>(num_ranks));
         num_ranks % spec.domain_size != 0; --spec.domain_size) {
    }
  }
  return spec;
}

void expect_the_plan_of_one_thread(const TokenCounts& counts,
                                   const PlanSpec& spec,
                                   int64_t num_runs,
                                   int64_t& num_clones) {
  const int64_t rank = num_runs % counts.num_ranks;
  const PlanOfRank found = plan_by_team(counts, spec, rank, num_runs);
  ASSERT_EQ(found.summary.is_valid, 1);
  ASSERT_TRUE(found == plan_by_one_thread(counts, spec, rank));
  num_clones += found.summary.num_clones;
}

TEST(TeamPlanner, PlansOfManyThreadsAreThoseOfOneForRandomInputs) {
  std::mt19937_64 random(1);
  int64_t num_clones = 0;
  for (int trial = 0; trial < 150; ++trial) {
    const int64_t num_ranks = int64_t{1} + static_cast<int64_t>(random() % 12);
    const int64_t num_experts = num_ranks * (int64_t{1} + static_cast<int64_t>(random() % 6));
    const std::vector<int64_t> tokens = random_counts(random, num_ranks, num_experts);
    const PlanSpec spec = random_spec(random, num_ranks);
    const auto num_runs = 1 + static_cast<int64_t>(random() % 33);
    SCOPED_TRACE(trial);
    ASSERT_NO_FATAL_FAILURE(expect_the_plan_of_one_thread({tokens.data(), num_ranks, num_experts},
                                                          spec, num_runs, num_clones));
  }
  EXPECT_GT(num_clones, 300);
}

TEST(TeamPlanner, PlansOfManyThreadsAreThoseOfOneForLargeGroups) {
  std::mt19937_64 random(2);
  int64_t num_clones = 0;
  for (int trial = 0; trial < 6; ++trial) {
    const int64_t num_ranks = trial % 2 == 0 ? 64 : 32;
    const int64_t num_experts = trial % 3 == 0 ? 512 : 256;
    const std::vector<int64_t> tokens = random_counts(random, num_ranks, num_experts);
    const PlanSpec spec = random_spec(random, num_ranks);
    SCOPED_TRACE(trial);
    ASSERT_NO_FATAL_FAILURE(expect_the_plan_of_one_thread({tokens.data(), num_ranks, num_experts},
                                                          spec, 16, num_clones));
  }
  EXPECT_GT(num_clones, 50);
}

// Products of tokens beyond what a double can represent, up to the most tokens of an expert.
TEST(TeamPlanner, PlansOfManyThreadsAreThoseOfOneForLargeCounts) {
  std::mt19937_64 random(3);
  int64_t num_clones = 0;
  for (int trial = 0; trial < 20; ++trial) {
    const int64_t num_ranks = trial % 2 == 0 ? 8 : 5;
    const int64_t num_experts = 3 * num_ranks;
    std::vector<int64_t> tokens;
    for (int64_t i = 0; i < num_ranks * num_experts; ++i) {
      const auto heat =
          static_cast<uint64_t>(i % num_experts % 4 == 0 ? num_ranks : 40 * num_ranks);
      tokens.push_back(
          static_cast<int64_t>(random() % (static_cast<uint64_t>(kMaxTokensPerExpert) / heat)));
    }
    PlanSpec spec = random_spec(random, num_ranks);
    spec.num_spare_slots = 2;
    spec.min_imbalance_per_million = kMillion;
    SCOPED_TRACE(trial);
    ASSERT_NO_FATAL_FAILURE(expect_the_plan_of_one_thread({tokens.data(), num_ranks, num_experts},
                                                          spec, 16, num_clones));
  }
  EXPECT_GT(num_clones, 50);
}

TEST(TeamPlanner, MarksBadCountsAndMakesNoClones) {
  for (const int64_t bad : {int64_t{-1}, kMaxTokensPerExpert + 1, kMaxTokensPerExpert - 2}) {
    const std::vector<int64_t> tokens{bad, 5, 7, 100, 3, 3, 3, 3};
    const PlanSpec spec{.num_spare_slots = 2};
    const PlanOfRank found = plan_by_team({tokens.data(), 2, 4}, spec, 1, 4);
    EXPECT_EQ(found.summary.is_valid, 0);
    EXPECT_EQ(found.summary.bound_holds, 0);
    EXPECT_EQ(found.summary.num_clones, 0);
    EXPECT_EQ(found.slot_expert, (std::vector<int64_t>{-1, -1, -1, -1}));
    EXPECT_EQ(found.sent, std::vector<int64_t>(4, 0));
    EXPECT_EQ(found.arriving, (std::vector<int64_t>{7, 100, 0, 0, 3, 3, 0, 0}));
  }
}

}  // namespace
}  // namespace megacore::moe
