#include "megacore/buffer/shard_map.h"

#include <gtest/gtest.h>

#include <random>
#include <stdexcept>

namespace megacore::buffer {
namespace {

TEST(ShardMap, GivesTheFourRangesOfAParameterThatCrossesAShardBorder) {
  const BufferPlan plan = plan_buckets({.numels = {2, 6, 5, 3},
                                        .dp_size = 4,
                                        .bucket_numel = 16,
                                        .param_alignment = 1,
                                        .bucket_alignment = 4});
  EXPECT_EQ(
      to_text(plan, 0),
      "shard 0 of 4: 4 elements\n"
      "  param 3 bucket 0 world [0, 3) bucket_range [0, 3) local [0, 3) param_range [0, 3)\n"
      "  param 2 bucket 0 world [3, 4) bucket_range [3, 4) local [3, 4) param_range [0, 1)\n");
  EXPECT_EQ(
      to_text(plan, 1),
      "shard 1 of 4: 4 elements\n"
      "  param 2 bucket 0 world [4, 8) bucket_range [4, 8) local [0, 4) param_range [1, 5)\n");
  EXPECT_EQ(
      to_text(plan, 3),
      "shard 3 of 4: 4 elements\n"
      "  param 1 bucket 0 world [12, 14) bucket_range [12, 14) local [0, 2) param_range [4, 6)\n"
      "  param 0 bucket 0 world [14, 16) bucket_range [14, 16) local [2, 4) param_range [0, 2)\n");
}

TEST(ShardMap, PutsTheSlicesOfSeveralBucketsOneAfterTheOther) {
  const BufferPlan plan = plan_buckets({.numels = {8, 8},
                                        .dp_size = 2,
                                        .bucket_numel = 8,
                                        .param_alignment = 1,
                                        .bucket_alignment = 2});
  EXPECT_EQ(shard_range(plan, 1, 1), (Range{12, 16}));
  const std::vector<ShardPiece> pieces = shard_pieces(plan, 1);
  ASSERT_EQ(pieces.size(), 2U);
  EXPECT_EQ(pieces[1], (ShardPiece{0, 1, {12, 16}, {4, 8}, {4, 8}, {4, 8}}));
}

TEST(ShardMap, LeavesARankEmptyWhenItsSliceIsPadding) {
  const BufferPlan plan = plan_buckets({.numels = {5}, .dp_size = 4});
  EXPECT_EQ(shard_pieces(plan, 0).size(), 1U);
  EXPECT_TRUE(shard_pieces(plan, 3).empty());
  EXPECT_EQ(plan.shard_numel(), 32);
}

TEST(ShardMap, RejectsARankOrBucketThatDoesNotExist) {
  const BufferPlan plan = plan_buckets({.numels = {5}, .dp_size = 2});
  EXPECT_THROW(shard_pieces(plan, 2), std::out_of_range);
  EXPECT_THROW(shard_pieces(plan, -1), std::out_of_range);
  EXPECT_THROW(shard_range(plan, 1, 0), std::out_of_range);
}

// Every element of every parameter is in one piece, and the coordinates of a piece agree.
void expect_exact_cover(const BufferPlan& plan) {
  std::vector<int> owners(static_cast<size_t>(plan.numel), 0);
  for (int64_t rank = 0; rank < plan.dp_size; ++rank) {
    int64_t local_end = 0;
    for (const ShardPiece& piece : shard_pieces(plan, rank)) {
      const Range param = plan.param_range(piece.param_index);
      const Range owned = shard_range(plan, piece.bucket, rank);
      const Bucket& bucket = plan.buckets[static_cast<size_t>(piece.bucket)];
      ASSERT_GT(piece.world.numel(), 0);
      ASSERT_EQ(piece.world.start - piece.param.start, param.start);
      ASSERT_EQ(piece.world.start - piece.bucket_range.start, bucket.start);
      ASSERT_EQ(piece.param.numel(), piece.world.numel());
      ASSERT_EQ(piece.bucket_range.numel(), piece.world.numel());
      ASSERT_EQ(piece.local.numel(), piece.world.numel());
      ASSERT_TRUE(owned.start <= piece.world.start && piece.world.end <= owned.end);
      ASSERT_TRUE(param.start <= piece.world.start && piece.world.end <= param.end);
      ASSERT_GE(piece.local.start, local_end);
      ASSERT_LE(piece.local.end, plan.shard_numel());
      local_end = piece.local.end;
      for (int64_t i = piece.world.start; i < piece.world.end; ++i) {
        ++owners[static_cast<size_t>(i)];
      }
    }
  }
  for (const Range& range : plan.param_ranges) {
    for (int64_t i = range.start; i < range.end; ++i) {
      ASSERT_EQ(owners[static_cast<size_t>(i)], 1) << "element " << i;
      owners[static_cast<size_t>(i)] = 0;
    }
  }
  for (const int count : owners) {
    ASSERT_EQ(count, 0) << "padding is owned";
  }
}

TEST(ShardMap, OwnsEveryElementOnceInRandomPlans) {
  std::mt19937_64 random(7);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int trial = 0; trial < 3000; ++trial) {
    SCOPED_TRACE(trial);
    BucketPlanSpec spec = {.dp_size = pick(1, 9), .bucket_numel = pick(1, 300)};
    for (int64_t i = pick(0, 8); i > 0; --i) {
      spec.numels.push_back(pick(0, 200));
      spec.shared.push_back(pick(0, 5) == 0);
    }
    spec.param_alignment = pick(1, 64);
    spec.bucket_alignment = spec.dp_size * pick(1, 20);
    expect_exact_cover(plan_buckets(spec));
    if (::testing::Test::HasFatalFailure()) {
      return;
    }
  }
}

}  // namespace
}  // namespace megacore::buffer
