#include "megacore/moe/reroute.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <stdexcept>
#include <vector>

namespace megacore::moe {
namespace {

// One hot expert of rank 0 with a clone on each further rank; a place is a number of a rank there:
// 0 for the home, 1, 2 ... for the clones.
struct OneExpert {
  PlanShape shape = {};
  std::vector<int64_t> total;
  std::vector<int64_t> first;
  std::vector<int64_t> slot_expert;
  std::vector<int64_t> tokens;

  OneExpert(int64_t total_copies, const std::vector<int64_t>& clones) {
    const auto ranks = static_cast<int64_t>(clones.size()) + 1;
    shape = {.num_ranks = ranks, .num_experts = ranks, .num_spare_slots = 1};
    total.assign(static_cast<size_t>(ranks), 0);
    total[0] = total_copies;
    first.assign(static_cast<size_t>(ranks), 0);
    slot_expert.assign(static_cast<size_t>(ranks), 0);
    slot_expert[0] = -1;
    tokens = clones;
    tokens.insert(tokens.begin(), 0);
  }

  SourceRow row() const {
    return {.shape = shape,
            .total = total.data(),
            .first = first.data(),
            .slot_expert = slot_expert.data(),
            .tokens = tokens.data()};
  }

  std::vector<int64_t> run(int64_t numel) const {
    const std::vector<int64_t> experts(static_cast<size_t>(numel), 0);
    std::vector<int64_t> places(experts.size());
    reroute_copies(experts.data(), numel, row(), places.data());
    for (int64_t& place : places) {
      EXPECT_TRUE(place == 0 || place % 2 == 1);  // home of expert 0, or the slot of a rank
      place /= 2;
    }
    return places;
  }
};

TEST(Reroute, SpreadsAQuarterEvenly) {
  EXPECT_EQ(OneExpert(8, {2}).run(8), (std::vector<int64_t>{0, 0, 0, 1, 0, 0, 0, 1}));
}

TEST(Reroute, EveryCloneGetsExactlyItsNumber) {
  for (int64_t total = 1; total <= 24; ++total) {
    for (int64_t a = 0; a <= total; ++a) {
      for (int64_t b = 0; a + b <= total; ++b) {
        std::map<int64_t, int64_t> counts;
        for (const int64_t place : OneExpert(total, {a, b}).run(total)) {
          ++counts[place];
        }
        EXPECT_EQ(counts[1], a) << total;
        EXPECT_EQ(counts[2], b) << total;
        EXPECT_EQ(counts[0], total - a - b);
      }
    }
  }
}

TEST(Reroute, NoRunOfTokensFloodsAClone) {
  constexpr int64_t kTotal = 1000;
  constexpr int64_t kTokens = 370;
  const std::vector<int64_t> places = OneExpert(kTotal, {kTokens}).run(kTotal);
  int64_t gone = 0;
  for (int64_t i = 0; i < kTotal; ++i) {
    gone += places[static_cast<size_t>(i)];
    EXPECT_EQ(gone, (i + 1) * kTokens / kTotal);
  }
}

TEST(Reroute, MembersOfARankContinueEachOther) {
  OneExpert expert(10, {3, 4});
  const std::vector<int64_t> whole = expert.run(10);
  std::vector<int64_t> parts = expert.run(6);
  expert.first[0] = 6;
  const std::vector<int64_t> rest = expert.run(4);
  parts.insert(parts.end(), rest.begin(), rest.end());
  EXPECT_EQ(parts, whole);
}

TEST(Reroute, LargeCountsDoNotOverflow) {
  constexpr int64_t kTotal = (int64_t{1} << 31) - 1;
  OneExpert expert(kTotal, {kTotal - 1});
  expert.first[0] = kTotal - 2;
  EXPECT_EQ(expert.run(2), (std::vector<int64_t>{1, 1}));
}

TEST(Reroute, RefusesWhatThePlanDoesNotKnow) {
  EXPECT_THROW(OneExpert(2, {1}).run(3), std::invalid_argument);
  const OneExpert expert(2, {1});
  const std::vector<int64_t> wrong = {7};
  int64_t place = 0;
  EXPECT_THROW(reroute_copies(wrong.data(), 1, expert.row(), &place), std::invalid_argument);
  const std::vector<int64_t> right = {0};
  EXPECT_THROW(reroute_copies(right.data(), 1, OneExpert(2, {1, 2}).row(), &place),
               std::invalid_argument);
}

// A team as a block is one, run thread by thread: what a thread writes no other one reads before
// the team meets, so their order does not matter.
struct OneOfSeven {
  int which;
  int thread() const { return which; }
  int threads() const { return 7; }
};

TEST(Reroute, ATeamFindsThePlacesOfTheLoop) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 3000; ++round) {
    SCOPED_TRACE(round);
    const auto below = [&](int64_t limit) {
      return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
    };
    const PlanShape shape{.num_ranks = 1 + below(4), .num_experts = 0, .num_spare_slots = below(4)};
    PlanShape sized = shape;
    sized.num_experts = shape.num_ranks * (1 + below(4));
    const auto experts = static_cast<size_t>(sized.num_experts);
    std::vector<int64_t> expert_of(static_cast<size_t>(below(200)));
    std::vector<int64_t> counts(experts, 0);
    for (int64_t& expert : expert_of) {
      expert = below(sized.num_experts + 1) - 1;
      counts[static_cast<size_t>(std::max<int64_t>(expert, 0))] += expert >= 0 ? 1 : 0;
    }
    std::vector<int64_t> first(experts), total(experts), left(experts), start(experts, 0);
    for (size_t e = 0; e < experts; ++e) {
      first[e] = below(5);
      left[e] = total[e] = first[e] + counts[e] + below(5);
      start[e] = e == 0 ? 0 : start[e - 1] + counts[e - 1];
    }
    const auto slots = static_cast<size_t>(sized.num_slots());
    std::vector<int64_t> slot_expert(slots, -1), tokens(slots, 0);
    for (size_t slot = 0; slot < slots; ++slot) {
      if (below(3) > 0) {
        const int64_t expert = below(sized.num_experts);
        slot_expert[slot] = expert;
        tokens[slot] = below(left[static_cast<size_t>(expert)] + 1);
        left[static_cast<size_t>(expert)] -= tokens[slot];
      }
    }
    const SourceRow row{.shape = sized,
                        .total = total.data(),
                        .first = first.data(),
                        .slot_expert = slot_expert.data(),
                        .tokens = tokens.data()};
    std::vector<int64_t> expected(expert_of.size());
    reroute_copies(expert_of.data(), static_cast<int64_t>(expert_of.size()), row, expected.data());

    std::vector<int64_t> memory(static_cast<size_t>(RerouteParts::words(sized)), -77);
    const RerouteParts parts = RerouteParts::at(memory.data(), sized);
    for (int thread = 6; thread >= 0; --thread) {
      make_parts(OneOfSeven{thread}, row, parts);
    }
    std::vector<int64_t> next = start;
    for (size_t i = 0; i < expert_of.size(); ++i) {
      const int64_t expert = expert_of[i];
      const auto at = static_cast<size_t>(std::max<int64_t>(expert, 0));
      const int64_t sorted_row = expert < 0 ? -1 : next[at]++;
      EXPECT_EQ(place_of_copy(row, parts, expert, sorted_row - start[at]), expected[i]);
    }
  }
}

}  // namespace
}  // namespace megacore::moe
