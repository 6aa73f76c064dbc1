#include "megacore/buffer/bucket_plan.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <stdexcept>

namespace megacore::buffer {
namespace {

TEST(BucketPlan, ReproducesTheFourParameterExample) {
  // 16 elements on 4 ranks; the buffer starts with 3 and then 5 elements.
  const BufferPlan plan = plan_buckets({.numels = {2, 6, 5, 3},
                                        .dp_size = 4,
                                        .bucket_numel = 16,
                                        .param_alignment = 1,
                                        .bucket_alignment = 4});
  EXPECT_EQ(to_text(plan),
            "buffer: 4 parameters, 16 elements, dp 4\n"
            "bucket 0 [0, 16) unpadded 16\n"
            "  param 3 [0, 3)\n"
            "  param 2 [3, 8)\n"
            "  param 1 [8, 14)\n"
            "  param 0 [14, 16)\n");
}

TEST(BucketPlan, AlignsParametersAndPadsBuckets) {
  const BufferPlan plan = plan_buckets({.numels = {100, 10}, .dp_size = 3});
  EXPECT_EQ(plan.bucket_alignment, 384);
  EXPECT_EQ(plan.param_range(1), (Range{0, 10}));
  EXPECT_EQ(plan.param_range(0), (Range{64, 164}));
  ASSERT_EQ(plan.buckets.size(), 1U);
  EXPECT_EQ(plan.buckets[0], (Bucket{0, 384, 164, {1, 0}}));
  EXPECT_EQ(plan.numel, 384);
}

TEST(BucketPlan, ClosesABucketOnceItSpansTheWantedSize) {
  const BufferPlan plan =
      plan_buckets({.numels = {64, 64, 64, 64, 64}, .dp_size = 2, .bucket_numel = 128});
  ASSERT_EQ(plan.buckets.size(), 3U);
  EXPECT_EQ(plan.buckets[0].param_indices, (std::vector<int64_t>{4, 3}));
  EXPECT_EQ(plan.buckets[2].param_indices, (std::vector<int64_t>{0}));
  EXPECT_EQ(plan.buckets[2].numel_unpadded, 64);
  EXPECT_EQ(plan.buckets[2].numel(), 128);
}

TEST(BucketPlan, KeepsASharedParameterAlone) {
  const BufferPlan plan = plan_buckets({.numels = {50, 60, 70, 80},
                                        .dp_size = 2,
                                        .bucket_numel = 1000,
                                        .shared = {false, false, true, false}});
  ASSERT_EQ(plan.buckets.size(), 3U);
  EXPECT_EQ(plan.buckets[0].param_indices, (std::vector<int64_t>{3}));
  EXPECT_EQ(plan.buckets[1].param_indices, (std::vector<int64_t>{2}));
  EXPECT_EQ(plan.buckets[2].param_indices, (std::vector<int64_t>{1, 0}));
}

TEST(BucketPlan, GrowsTheDefaultBucketWithManyRanks) {
  EXPECT_EQ(default_bucket_numel(1), 40'000'000);
  EXPECT_EQ(default_bucket_numel(40), 40'000'000);
  EXPECT_EQ(default_bucket_numel(64), 64'000'000);
}

TEST(BucketPlan, PadsForARingOnRequest) {
  EXPECT_EQ(plan_buckets({.numels = {1}, .dp_size = 3, .pad_for_ring = true}).numel, 3 * 65536);
  EXPECT_EQ(plan_buckets({.numels = {1}, .dp_size = 8, .pad_for_ring = true}).numel, 65536);
  const BucketPlanSpec own = {
      .numels = {1}, .dp_size = 4, .bucket_alignment = 12, .pad_for_ring = true};
  EXPECT_EQ(plan_buckets(own).bucket_alignment, 3 * 65536);
  EXPECT_THROW(plan_buckets({.bucket_alignment = int64_t{1} << 50, .pad_for_ring = true}),
               std::invalid_argument);
}

TEST(BucketPlan, HandlesNothingAndEmptyParameters) {
  EXPECT_EQ(plan_buckets({.dp_size = 4}).numel, 0);
  const BufferPlan plan = plan_buckets({.numels = {0, 0}, .dp_size = 4});
  EXPECT_EQ(plan.numel, 0);
  ASSERT_EQ(plan.buckets.size(), 1U);
  EXPECT_EQ(plan.buckets[0].numel(), 0);
}

TEST(BucketPlan, RejectsWhatCannotBeLaidOut) {
  EXPECT_THROW(plan_buckets({.numels = {1}, .dp_size = 0}), std::invalid_argument);
  EXPECT_THROW(plan_buckets({.numels = {1, -1}}), std::invalid_argument);
  EXPECT_THROW(plan_buckets({.numels = {1}, .bucket_numel = 0}), std::invalid_argument);
  EXPECT_THROW(plan_buckets({.numels = {1}, .param_alignment = 0}), std::invalid_argument);
  EXPECT_THROW(plan_buckets({.numels = {1}, .shared = {true, false}}), std::invalid_argument);
  EXPECT_THROW(plan_buckets({.numels = {1}, .dp_size = 4, .bucket_alignment = 6}),
               std::invalid_argument);
  const int64_t huge = std::numeric_limits<int64_t>::max();
  EXPECT_THROW(plan_buckets({.numels = {huge, huge}}), std::invalid_argument);
  EXPECT_THROW(plan_buckets({.numels = {int64_t{1} << 60, 1}}), std::invalid_argument);
  EXPECT_THROW(plan_buckets({.numels = {1}, .bucket_alignment = huge}), std::invalid_argument);
  EXPECT_THROW(plan_buckets({.numels = {1}}).param_range(1), std::out_of_range);
}

// A plan with random sizes, flags and options.
BucketPlanSpec random_spec(std::mt19937_64& random) {
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  BucketPlanSpec spec = {.dp_size = pick(1, 9), .bucket_numel = pick(1, 600)};
  for (int64_t i = pick(0, 12); i > 0; --i) {
    spec.numels.push_back(pick(0, 3) == 0 ? pick(0, 2) : pick(0, 500));
    spec.shared.push_back(pick(0, 9) == 0);
  }
  if (pick(0, 1) == 1) {
    spec.param_alignment = pick(1, 70);
    spec.bucket_alignment = spec.dp_size * pick(1, 40);
  }
  return spec;
}

void expect_rules_hold(const BucketPlanSpec& spec, const BufferPlan& plan) {
  int64_t position = 0;
  std::vector<int64_t> placed;
  for (const Bucket& bucket : plan.buckets) {
    ASSERT_EQ(bucket.start, position);
    ASSERT_FALSE(bucket.param_indices.empty());
    ASSERT_EQ(bucket.end % plan.bucket_alignment, 0);
    ASSERT_LT(bucket.numel() - bucket.numel_unpadded, plan.bucket_alignment);
    int64_t at = bucket.start;
    for (const int64_t index : bucket.param_indices) {
      const Range& range = plan.param_range(index);
      ASSERT_EQ(range.start % plan.param_alignment, 0);
      ASSERT_GE(range.start, at);
      ASSERT_LT(range.start - at, plan.param_alignment);
      ASSERT_EQ(range.numel(), spec.numels[static_cast<size_t>(index)]);
      // Only the last parameter may take the bucket to its wanted size.
      ASSERT_TRUE(at == bucket.start || at - bucket.start < plan.bucket_numel);
      const bool alone = bucket.param_indices.size() == 1;
      ASSERT_TRUE(alone || !spec.shared[static_cast<size_t>(index)]);
      at = range.end;
      placed.push_back(index);
    }
    ASSERT_EQ(at - bucket.start, bucket.numel_unpadded);
    position = bucket.end;
  }
  ASSERT_EQ(position, plan.numel);
  std::vector<int64_t> reversed(spec.numels.size());
  std::iota(reversed.rbegin(), reversed.rend(), 0);
  ASSERT_EQ(placed, reversed);
}

TEST(BucketPlan, RulesHoldForRandomPlans) {
  std::mt19937_64 random(20240607);
  for (int trial = 0; trial < 20000; ++trial) {
    SCOPED_TRACE(trial);
    const BucketPlanSpec spec = random_spec(random);
    expect_rules_hold(spec, plan_buckets(spec));
    if (::testing::Test::HasFatalFailure()) {
      return;
    }
  }
}

}  // namespace
}  // namespace megacore::buffer
