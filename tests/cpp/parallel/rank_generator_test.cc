#include "megacore/parallel/rank_generator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace megacore::parallel {
namespace {

using Matrix = std::vector<std::vector<int32_t>>;

Matrix rows(const RankGroups& groups) {
  Matrix result;
  for (int64_t i = 0; i < groups.num_groups; ++i) {
    const auto group = groups.group(i);
    result.emplace_back(group.begin(), group.end());
  }
  return result;
}

// A worked example of the masking rule: shape (2, 3, 4), only the middle axis masked.
TEST(RankGenerator, MasksTheMiddleAxisOfThree) {
  const RankGenerator ranks({{"tp", 2}, {"dp", 3}, {"pp", 4}});
  EXPECT_EQ(rows(ranks.groups("dp")), (Matrix{{0, 2, 4},
                                              {1, 3, 5},
                                              {6, 8, 10},
                                              {7, 9, 11},
                                              {12, 14, 16},
                                              {13, 15, 17},
                                              {18, 20, 22},
                                              {19, 21, 23}}));
}

TEST(RankGenerator, JoinsAxesOfAToken) {
  const RankGenerator ranks({{"tp", 2}, {"cp", 2}, {"dp", 2}});
  EXPECT_EQ(rows(ranks.groups("tp-cp")), (Matrix{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(rows(ranks.groups("tp-dp")), (Matrix{{0, 1, 4, 5}, {2, 3, 6, 7}}));
}

TEST(RankGenerator, IgnoresTheOrderOfAxesInsideAToken) {
  const RankGenerator ranks({{"tp", 2}, {"cp", 3}, {"dp", 2}, {"pp", 2}});
  EXPECT_EQ(ranks.groups("dp-tp-pp"), ranks.groups("pp-tp-dp"));
}

TEST(RankGenerator, MakesOneGroupPerRankForAnAxisOfSizeOne) {
  const RankGenerator ranks({{"tp", 1}, {"dp", 3}});
  EXPECT_EQ(rows(ranks.groups("tp")), (Matrix{{0}, {1}, {2}}));
}

TEST(RankGenerator, MakesOneGroupOfTheWholeWorldForAllAxes) {
  const RankGenerator ranks({{"tp", 2}, {"dp", 2}});
  EXPECT_EQ(rows(ranks.groups("tp-dp")), (Matrix{{0, 1, 2, 3}}));
}

TEST(RankGenerator, ShiftsEveryRankByTheOffset) {
  const RankGenerator ranks({{"tp", 2}, {"dp", 2}}, 100);
  EXPECT_EQ(rows(ranks.groups("dp")), (Matrix{{100, 102}, {101, 103}}));
  EXPECT_EQ(ranks.group_of(103, "tp"), (std::vector<int32_t>{102, 103}));
  EXPECT_EQ(ranks.coordinates(101), (std::vector<int64_t>{1, 0}));
}

TEST(RankGenerator, PartitionsTheWorldForEverySetOfAxes) {
  const std::vector<std::string> axes = {"tp", "cp", "ep", "dp", "pp"};
  const RankGenerator ranks({{"pp", 2}, {"cp", 3}, {"tp", 2}, {"ep", 1}, {"dp", 5}});
  std::vector<int32_t> world(static_cast<size_t>(ranks.world_size()));
  std::iota(world.begin(), world.end(), 0);
  for (size_t set = 1; set < (size_t{1} << axes.size()); ++set) {
    std::string token;
    for (size_t i = 0; i < axes.size(); ++i) {
      if ((set >> i & 1) != 0) {
        token += (token.empty() ? "" : "-") + axes[i];
      }
    }
    SCOPED_TRACE(token);
    RankGroups groups = ranks.groups(token);
    EXPECT_EQ(groups.group_size, ranks.group_size(token));
    for (int64_t i = 0; i < groups.num_groups; ++i) {
      const auto group = groups.group(i);
      EXPECT_TRUE(std::ranges::is_sorted(group));
      for (const int32_t rank : group) {
        EXPECT_EQ(ranks.group_of(rank, token), (std::vector<int32_t>(group.begin(), group.end())));
      }
    }
    std::ranges::sort(groups.ranks);
    EXPECT_EQ(groups.ranks, world);
  }
}

TEST(RankGenerator, GivesCoordinatesAndBack) {
  const RankGenerator ranks({{"tp", 3}, {"dp", 2}, {"pp", 4}}, 7);
  for (int64_t rank = 7; rank < 7 + ranks.world_size(); ++rank) {
    EXPECT_EQ(ranks.rank(ranks.coordinates(rank)), rank);
  }
  EXPECT_EQ(ranks.stride("dp"), 3);
  EXPECT_EQ(ranks.stride("pp"), 6);
}

TEST(RankGenerator, RejectsRanksAndCoordinatesOutsideTheLayout) {
  const RankGenerator ranks({{"tp", 2}, {"dp", 2}}, 4);
  EXPECT_THROW(ranks.coordinates(3), std::invalid_argument);
  EXPECT_THROW(ranks.coordinates(8), std::invalid_argument);
  EXPECT_THROW(ranks.group_of(8, "tp"), std::invalid_argument);
  EXPECT_THROW(ranks.rank(std::vector<int64_t>{0}), std::invalid_argument);
  EXPECT_THROW(ranks.rank(std::vector<int64_t>{0, 2}), std::invalid_argument);
  EXPECT_THROW(ranks.rank(std::vector<int64_t>{-1, 0}), std::invalid_argument);
  EXPECT_THROW(ranks.groups("tp").group(2), std::invalid_argument);
}

TEST(RankGenerator, RejectsLayoutsThatMakeNoSense) {
  EXPECT_THROW(RankGenerator({{"tp", 0}}), std::invalid_argument);
  EXPECT_THROW(RankGenerator({{"tp", 2}, {"tp", 2}}), std::invalid_argument);
  EXPECT_THROW(RankGenerator({{"tp", 2}}, -1), std::invalid_argument);
}

TEST(RankGenerator, RejectsWorldsThatDoNotFitARankNumber) {
  const int64_t big = int64_t{1} << 31;
  EXPECT_THROW(RankGenerator({{"tp", big}}), std::invalid_argument);
  EXPECT_THROW(RankGenerator({{"tp", 2}}, big), std::invalid_argument);
  EXPECT_THROW(RankGenerator({{"tp", big * 2}, {"dp", big * 2}}), std::invalid_argument);
}

TEST(RankGenerator, NumbersTheLastRanksThatFit) {
  const int64_t last = (int64_t{1} << 31) - 2;
  const RankGenerator ranks({{"tp", 2}, {"dp", 2}}, last - 3);
  EXPECT_EQ(ranks.group_of(last, "tp-dp").back(), last);
}

}  // namespace
}  // namespace megacore::parallel
