#include "megacore/moe/documented.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "megacore/moe/source_split.h"

namespace megacore::moe {
namespace {

using Values = std::vector<int64_t>;

TEST(Documented, FloorAverageRoundsDown) {
  EXPECT_EQ(floor_average(Values{500, 200, 300, 400}), 350);
  EXPECT_EQ(floor_average(Values{1, 1, 1, 0}), 0);
  EXPECT_THROW(static_cast<void>(floor_average(Values{})), std::invalid_argument);
}

TEST(Documented, SpareCapacityIsTheFreeRoomNotTheExcess) {
  EXPECT_EQ(spare_capacity(Values{500, 200, 300, 400}, 350), (Values{0, 150, 50, 0}));
}

TEST(Documented, HottestExpertsSpillFirst) {
  EXPECT_EQ(spillover(Values{50, 100, 150, 200}, 1, 250), (Values{0, 0, 50, 200}));
  EXPECT_EQ(spillover(Values{200, 50, 150, 100}, 1, 250), (Values{200, 0, 50, 0}));
}

TEST(Documented, OfEqualExpertsTheLaterSpills) {
  EXPECT_EQ(spillover(Values{100, 100, 100}, 1, 250), (Values{0, 0, 50}));
}

TEST(Documented, EveryRankSpillsExactlyItsExcess) {
  EXPECT_EQ(spillover(Values{400, 100, 150, 50}, 2, 350), (Values{150, 0, 0, 0}));
  EXPECT_THROW(static_cast<void>(spillover(Values{1, 2, 3}, 2, 1)), std::invalid_argument);
}

TEST(Documented, ChunkZeroOverlapsTheSecondBucketToo) {
  EXPECT_EQ(interval_overlap(Values{100, 150}, Values{80, 120}),
            (std::vector<Piece>{{0, 0, 80}, {0, 1, 20}, {1, 1, 100}}));
}

TEST(Documented, EmptyIntervalsOverlapNothing) {
  EXPECT_EQ(interval_overlap(Values{0, 5, 0}, Values{0, 3, 0, 2, 0}),
            (std::vector<Piece>{{1, 1, 3}, {1, 3, 2}}));
  EXPECT_TRUE(interval_overlap(Values{}, Values{3}).empty());
  EXPECT_TRUE(interval_overlap(Values{3}, Values{}).empty());
}

TEST(Documented, LargestSpilloverMeetsLargestRoom) {
  EXPECT_EQ(assign_spillover(Values{0, 80, 0, 0, 50, 100, 0, 30}, Values{0, 120, 60, 0}),
            (std::vector<Piece>{{5, 1, 100}, {1, 1, 20}, {1, 2, 60}}));
}

TEST(Documented, SlotsTakeTheLargestPieces) {
  const std::vector<Piece> pieces{{1, 1, 20}, {5, 1, 100}, {7, 1, 20}, {1, 2, 60}};
  EXPECT_EQ(top_pieces(pieces, 1), (std::vector<Clone>{{5, 1, 0, 100}, {1, 2, 0, 60}}));
  EXPECT_EQ(top_pieces(pieces, 2),
            (std::vector<Clone>{{5, 1, 0, 100}, {1, 1, 1, 20}, {1, 2, 0, 60}}));
  EXPECT_TRUE(top_pieces(pieces, 0).empty());
}

TEST(Documented, WholeExamplePlansEightExpertsOnFourRanks) {
  // The loads behind the spillover of the example: average 180, ranks 0 and 1 of 2 experts each.
  const Loads loads{
      .experts = {100, 160, 60, 0, 110, 170, 100, 20}, .ranks = {260, 60, 280, 120}, .total = 720};
  EXPECT_EQ(spillover(loads.experts, 4, 180), (Values{0, 80, 0, 0, 0, 100, 0, 0}));
  EXPECT_EQ(plan_documented(loads, 1), (std::vector<Clone>{{5, 1, 0, 100}, {1, 3, 0, 60}}));
  EXPECT_EQ(plan_documented(loads, 2),
            (std::vector<Clone>{{5, 1, 0, 100}, {1, 1, 1, 20}, {1, 3, 0, 60}}));
}

TEST(SourceSplit, FirstPassIsProportional) {
  EXPECT_EQ(breadth_first_shares(Values{30, 50, 20}, Values{80}), (Values{24, 40, 16}));
  EXPECT_EQ(breadth_first_shares(Values{30, 50, 20}, Values{83}), (Values{24, 41, 16}));
  EXPECT_EQ(breadth_first_shares(Values{0, 0}, Values{0}), (Values{0, 0}));
}

TEST(SourceSplit, SecondPassFillsInRankOrder) {
  EXPECT_EQ(depth_first_shares(Values{6, 9, 4}, Values{2}), (Values{2, 0, 0}));
  EXPECT_EQ(depth_first_shares(Values{1, 9, 4}, Values{2, 3}), (Values{1, 0, 1, 3, 0, 0}));
}

TEST(SourceSplit, ExampleOfTwoPasses) {
  const std::vector<Clone> clone{{.expert = 0, .rank = 1, .slot = 0, .tokens = 83}};
  EXPECT_EQ(split_expert(Values{30, 50, 20}, 0, clone, false), (Values{26, 41, 16}));
}

TEST(SourceSplit, ExactBeyondTheIntegersOfAFloat) {
  // floor(16777217 * 33554433 / 33554434) needs more bits than fp32 or fp64 products keep.
  EXPECT_EQ(breadth_first_shares(Values{16777217, 16777217}, Values{33554433}),
            (Values{16777216, 16777216}));
}

TEST(SourceSplit, CloneServesItsOwnRankAndHomeKeepsItsOwn) {
  // Home 0 keeps 40 of 100 tokens, all of them its own; clone on 1 takes its own 30 first.
  const std::vector<Clone> clone{{.expert = 0, .rank = 1, .slot = 0, .tokens = 60}};
  EXPECT_EQ(split_expert(Values{50, 30, 20}, 0, clone, true), (Values{10, 30, 20}));
}

TEST(SourceSplit, SeveralClonesShareWhatIsNotLocal) {
  const std::vector<Clone> clones{{.expert = 0, .rank = 1, .slot = 0, .tokens = 10},
                                  {.expert = 0, .rank = 2, .slot = 1, .tokens = 10}};
  // Local: 4 and 6; the home keeps 10 of its 12 tokens. Sources 0 and 3 have 2 and 8 left for the 6
  // and 4 tokens that the clones still miss: shares 1, 0, 4, 3, and the rest goes to source 0
  // and 3.
  EXPECT_EQ(split_expert(Values{12, 4, 6, 8}, 0, clones, true), (Values{2, 0, 4, 0, 0, 6, 4, 4}));
}

}  // namespace
}  // namespace megacore::moe
