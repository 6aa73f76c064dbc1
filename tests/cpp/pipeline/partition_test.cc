#include "megacore/pipeline/partition.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "schedule_checks.h"

namespace megacore::pipeline {
namespace {

std::vector<int> counts(const PartitionShape& shape) {
  std::vector<int> sizes;
  for (const LayerRange& range : partition_layers(shape)) sizes.push_back(range.end - range.begin);
  return sizes;
}

std::string refusal(const PartitionShape& shape) {
  return message_of([&] { partition_layers(shape); });
}

TEST(Partition, SpreadsEvenlyInStageOrder) {
  const std::vector<LayerRange> expected = {{0, 2}, {2, 4}, {4, 6}, {6, 8}};
  EXPECT_EQ(partition_layers({.num_layers = 8, .num_ranks = 2, .num_chunks = 2}), expected);
}

TEST(Partition, FirstAndLastRanksMayDiffer) {
  EXPECT_EQ(counts({.num_layers = 14, .num_ranks = 4, .first = 3, .last = 1}),
            (std::vector<int>{3, 5, 5, 1}));
  EXPECT_EQ(counts({.num_layers = 14, .num_ranks = 4, .last = 2}), (std::vector<int>{4, 4, 4, 2}));
  EXPECT_EQ(counts({.num_layers = 5, .num_ranks = 2, .first = 2, .last = 3}),
            (std::vector<int>{2, 3}));
  EXPECT_EQ(counts({.num_layers = 5, .num_ranks = 1, .first = 5}), (std::vector<int>{5}));
}

TEST(Partition, FirstAndLastAreSharedByTheChunksOfTheirRank) {
  EXPECT_EQ(counts({.num_layers = 14, .num_ranks = 3, .num_chunks = 2, .first = 4, .last = 2}),
            (std::vector<int>{2, 4, 1, 2, 4, 1}));
}

TEST(Partition, EmbeddingAndLossCountAsLayers) {
  EXPECT_EQ(counts({.num_layers = 6,
                    .num_ranks = 4,
                    .account_for_embedding = true,
                    .account_for_loss = true}),
            (std::vector<int>{1, 2, 2, 1}));
  EXPECT_EQ(counts({.num_layers = 2,
                    .num_ranks = 4,
                    .account_for_embedding = true,
                    .account_for_loss = true}),
            (std::vector<int>{0, 1, 1, 0}));
}

TEST(Partition, EveryErrorNamesTheRuleAndTheNearestLegalValues) {
  EXPECT_EQ(refusal({.num_layers = 30, .num_ranks = 4}),
            "num_layers 30 cannot be spread evenly over 4 stages (4 ranks). Nearest legal values, "
            "changing one setting: num_layers 28 or 32; num_ranks 3 or 5");
  EXPECT_EQ(refusal({.num_layers = 3, .num_ranks = 4}),
            "num_layers 3 cannot be spread evenly over 4 stages (4 ranks). Nearest legal values, "
            "changing one setting: num_layers 4; num_ranks 3");
  EXPECT_EQ(refusal({.num_layers = 14, .num_ranks = 4, .first = 4, .last = 1}),
            "of num_layers 14, first and last take 5; the other 9 cannot be spread evenly over 2 "
            "stages (2 ranks). Nearest legal values, changing one setting: num_layers 13 or 15; "
            "num_ranks 3 or 5; first 3 or 5; last 2");
  EXPECT_NE(refusal({.num_layers = 12, .num_ranks = 3, .num_chunks = 2, .first = 3})
                .find("first is 3, which its 2 chunks cannot share evenly"),
            std::string::npos);
  EXPECT_NE(refusal({.num_layers = 4, .num_ranks = 2, .first = 2, .last = 3})
                .find("first and last make 5 and no other rank is left"),
            std::string::npos);
  EXPECT_NE(refusal({.num_layers = 4, .num_ranks = 1, .first = 2, .last = 2})
                .find("leave one of them out"),
            std::string::npos);
  EXPECT_NE(refusal({.num_layers = 8, .num_ranks = 2, .first = 0}).find("at least 1 layer"),
            std::string::npos);
  EXPECT_NE(refusal({.num_layers = 8, .num_ranks = 2, .first = 2, .account_for_loss = true})
                .find("cannot be combined"),
            std::string::npos);
  EXPECT_NE(refusal({.num_layers = 0, .num_ranks = 2}).find("must be in 1.."), std::string::npos);
}

TEST(Partition, NoLayerIsEverLost) {
  int num_legal = 0;
  for (int layers = 1; layers <= 18; ++layers) {
    for (int ranks = 1; ranks <= 4; ++ranks) {
      for (int chunks = 1; chunks <= 3; ++chunks) {
        for (int first = 0; first <= 4; ++first) {
          for (int last = 0; last <= 4; ++last) {
            PartitionShape shape{.num_layers = layers, .num_ranks = ranks, .num_chunks = chunks};
            if (first > 0) shape.first = first;
            if (last > 0) shape.last = last;
            try {
              int next = 0;
              for (const LayerRange& range : partition_layers(shape)) {
                EXPECT_EQ(range.begin, next);
                EXPECT_GT(range.end, range.begin);
                next = range.end;
              }
              EXPECT_EQ(next, layers);
              ++num_legal;
            } catch (const std::invalid_argument&) {
            }
          }
        }
      }
    }
  }
  EXPECT_GT(num_legal, 200);
}

}  // namespace
}  // namespace megacore::pipeline
