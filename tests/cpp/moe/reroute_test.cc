#include "megacore/moe/reroute.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <vector>

namespace megacore::moe {
namespace {

// One expert with home 0 and clones at 1, 2 ...
struct OneExpert {
  int64_t home = 0;
  int64_t total = 0;
  int64_t first = 0;
  std::vector<int64_t> first_part = {0, 0};
  std::vector<int64_t> destination = {};
  std::vector<int64_t> tokens = {};

  OneExpert(int64_t total_copies, const std::vector<int64_t>& clones)
      : total(total_copies), tokens(clones) {
    for (size_t i = 0; i < clones.size(); ++i) {
      destination.push_back(static_cast<int64_t>(i) + 1);
    }
    first_part[1] = static_cast<int64_t>(clones.size());
  }

  RerouteTable table() const {
    return {1, &home, &total, &first, first_part.data(), destination.data(), tokens.data()};
  }

  std::vector<int64_t> run(int64_t numel) const {
    const std::vector<int64_t> experts(static_cast<size_t>(numel), 0);
    std::vector<int64_t> physical(experts.size());
    reroute_copies(experts.data(), numel, table(), physical.data());
    return physical;
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
  expert.first = 6;
  const std::vector<int64_t> rest = expert.run(4);
  parts.insert(parts.end(), rest.begin(), rest.end());
  EXPECT_EQ(parts, whole);
}

TEST(Reroute, LargeCountsDoNotOverflow) {
  constexpr int64_t kTotal = (int64_t{1} << 31) - 1;
  OneExpert expert(kTotal, {kTotal - 1});
  expert.first = kTotal - 2;
  EXPECT_EQ(expert.run(2), (std::vector<int64_t>{1, 1}));
}

TEST(Reroute, RefusesWhatThePlanDoesNotKnow) {
  EXPECT_THROW(OneExpert(2, {1}).run(3), std::invalid_argument);
  const OneExpert expert(2, {1});
  const std::vector<int64_t> wrong = {1};
  int64_t physical = 0;
  EXPECT_THROW(reroute_copies(wrong.data(), 1, expert.table(), &physical), std::invalid_argument);
}

}  // namespace
}  // namespace megacore::moe
