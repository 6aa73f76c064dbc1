// Rules of buffer plans over very many random plans. MEGACORE_RANDOM_PLANS sets how many; the
// default takes a second or two, and three million take half a minute without sanitizers.

#include <gtest/gtest.h>

#include <cstdlib>
#include <numeric>
#include <random>

#include "megacore/buffer/bucket_plan.h"
#include "megacore/buffer/shard_map.h"

namespace megacore::buffer {
namespace {

int64_t num_plans() {
  const char* text = std::getenv("MEGACORE_RANDOM_PLANS");
  return text != nullptr ? std::atoll(text) : 50'000;
}

class RandomSpecs {
 public:
  BucketPlanSpec next() {
    BucketPlanSpec spec = {.dp_size = pick(1, 17)};
    if (pick(0, 9) > 0) {
      spec.bucket_numel = pick(1, 3000);
    }
    const bool flags = pick(0, 1) == 1;
    for (int64_t i = pick(0, 12); i > 0; --i) {
      const int64_t kind = pick(0, 9);
      spec.numels.push_back(kind == 0   ? pick(0, 2)
                            : kind == 1 ? pick(0, 5'000'000'000)
                                        : pick(0, 1000));
      if (flags) {
        spec.shared.push_back(pick(0, 6) == 0);
      }
    }
    if (pick(0, 1) == 1) {
      spec.param_alignment = pick(1, 70);
    }
    if (pick(0, 1) == 1) {
      spec.bucket_alignment = spec.dp_size * pick(1, 40);
    }
    spec.pad_for_ring = pick(0, 7) == 0;
    return spec;
  }

 private:
  int64_t pick(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }

  std::mt19937_64 random_{20240701};
};

// Buckets tile the buffer, parameters lie in their bucket in reverse order without overlap, and no
// rule of bucket_plan.h is broken.
void expect_layout(const BucketPlanSpec& spec, const BufferPlan& plan) {
  const auto is_shared = [&](int64_t index) {
    return !spec.shared.empty() && spec.shared[static_cast<size_t>(index)];
  };
  int64_t start = 0, next = static_cast<int64_t>(spec.numels.size()) - 1;
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    const Bucket& bucket = plan.buckets[b];
    ASSERT_EQ(bucket.start, start);
    ASSERT_EQ(bucket.end % std::lcm(plan.bucket_alignment, plan.dp_size), 0);
    ASSERT_FALSE(bucket.param_indices.empty());
    int64_t at = start;
    for (size_t i = 0; i < bucket.param_indices.size(); ++i, --next) {
      ASSERT_EQ(bucket.param_indices[i], next);
      const Range& range = plan.param_range(next);
      ASSERT_EQ(range.numel(), spec.numels[static_cast<size_t>(next)]);
      ASSERT_EQ(range.start % plan.param_alignment, 0);
      ASSERT_TRUE(range.start >= at && range.start - at < plan.param_alignment);
      ASSERT_TRUE(i == 0 || at - start < plan.bucket_numel) << "should have closed before";
      ASSERT_TRUE(!is_shared(next) || bucket.param_indices.size() == 1);
      at = range.end;
    }
    ASSERT_EQ(bucket.numel_unpadded, at - start);
    ASSERT_TRUE(bucket.end >= at && bucket.end - at < plan.bucket_alignment);
    const bool last = b + 1 == plan.buckets.size();
    const bool full = at - start >= plan.bucket_numel;
    ASSERT_TRUE(last || full || is_shared(next) || is_shared(next + 1)) << "closed too early";
    start = bucket.end;
  }
  ASSERT_EQ(start, plan.numel);
  ASSERT_EQ(next, -1);
}

// Shards tile every bucket, and the pieces of all ranks tile every parameter.
void expect_shards(const BufferPlan& plan) {
  std::vector<std::vector<Range>> pieces_of(plan.param_ranges.size());
  for (int64_t rank = 0; rank < plan.dp_size; ++rank) {
    int64_t local_end = 0, last_bucket = 0;
    for (const ShardPiece& piece : shard_pieces(plan, rank)) {
      const Range owned = shard_range(plan, piece.bucket, rank);
      const Bucket& bucket = plan.buckets[static_cast<size_t>(piece.bucket)];
      ASSERT_EQ(owned.numel() * plan.dp_size, bucket.numel());
      ASSERT_EQ(owned.start, bucket.start + rank * owned.numel());
      ASSERT_TRUE(owned.start <= piece.world.start && piece.world.end <= owned.end);
      ASSERT_GT(piece.world.numel(), 0);
      ASSERT_EQ(piece.world.start, bucket.start + piece.bucket_range.start);
      ASSERT_EQ(piece.world.start, plan.param_range(piece.param_index).start + piece.param.start);
      // A shard is its slices, one after the other.
      ASSERT_EQ(piece.local.start, bucket.start / plan.dp_size + (piece.world.start - owned.start));
      ASSERT_TRUE(piece.local.start >= local_end && piece.local.end <= plan.shard_numel());
      ASSERT_TRUE(piece.bucket >= last_bucket);
      for (const Range& range : {piece.bucket_range, piece.local, piece.param}) {
        ASSERT_EQ(range.numel(), piece.world.numel());
      }
      local_end = piece.local.end;
      last_bucket = piece.bucket;
      pieces_of[static_cast<size_t>(piece.param_index)].push_back(piece.param);
    }
  }
  for (size_t i = 0; i < pieces_of.size(); ++i) {
    int64_t end = 0;
    for (const Range& piece : pieces_of[i]) {  // ranks in order, so pieces in order
      ASSERT_EQ(piece.start, end);
      end = piece.end;
    }
    ASSERT_EQ(end, plan.param_ranges[i].numel());
  }
}

TEST(PlanProperty, RangesTileBuffersBucketsShardsAndParameters) {
  RandomSpecs specs;
  for (int64_t trial = 0; trial < num_plans(); ++trial) {
    const BucketPlanSpec spec = specs.next();
    const BufferPlan plan = plan_buckets(spec);
    expect_layout(spec, plan);
    expect_shards(plan);
    if (::testing::Test::HasFatalFailure()) {
      FAIL() << "in random plan " << trial << ":\n" << to_text(plan);
    }
  }
}

}  // namespace
}  // namespace megacore::buffer
