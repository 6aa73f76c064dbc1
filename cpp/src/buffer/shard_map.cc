#include "megacore/buffer/shard_map.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "megacore/base/check.h"

namespace megacore::buffer {
namespace {

Range shifted(const Range& range, int64_t by) { return {range.start + by, range.end + by}; }

std::ostream& operator<<(std::ostream& stream, const Range& range) {
  return stream << "[" << range.start << ", " << range.end << ")";
}

// Appends the pieces of the parameters of `bucket` that `owned` (in buffer coordinates) meets.
// `local_start` is the position of owned.start in the shard.
void append_pieces(const BufferPlan& plan,
                   int64_t bucket,
                   const Range& owned,
                   int64_t local_start,
                   std::vector<ShardPiece>& pieces) {
  const Bucket& place = plan.buckets[static_cast<size_t>(bucket)];
  const auto ends_before_owned = [&](int64_t index) {
    return plan.param_range(index).end <= owned.start;
  };
  auto param = std::partition_point(place.param_indices.begin(), place.param_indices.end(),
                                    ends_before_owned);
  for (; param != place.param_indices.end(); ++param) {
    const Range& range = plan.param_range(*param);
    if (range.start >= owned.end) {
      return;
    }
    const Range world = {std::max(range.start, owned.start), std::min(range.end, owned.end)};
    if (world.numel() > 0) {
      pieces.push_back({.param_index = *param,
                        .bucket = bucket,
                        .world = world,
                        .bucket_range = shifted(world, -place.start),
                        .local = shifted(world, local_start - owned.start),
                        .param = shifted(world, -range.start)});
    }
  }
}

void check_dp_rank(const BufferPlan& plan, int64_t dp_rank) {
  if (dp_rank < 0 || dp_rank >= plan.dp_size) {
    throw std::out_of_range(
        base::format_text("dp_rank {} is not in [0, {})", dp_rank, plan.dp_size));
  }
}

}  // namespace

Range shard_range(const BufferPlan& plan, int64_t bucket, int64_t dp_rank) {
  check_dp_rank(plan, dp_rank);
  if (bucket < 0 || bucket >= static_cast<int64_t>(plan.buckets.size())) {
    throw std::out_of_range(
        base::format_text("bucket {} is not in [0, {})", bucket, plan.buckets.size()));
  }
  const Bucket& place = plan.buckets[static_cast<size_t>(bucket)];
  const int64_t slice = place.numel() / plan.dp_size;
  const int64_t start = place.start + dp_rank * slice;
  return {start, start + slice};
}

std::vector<ShardPiece> shard_pieces(const BufferPlan& plan, int64_t dp_rank) {
  check_dp_rank(plan, dp_rank);
  std::vector<ShardPiece> pieces;
  int64_t local_start = 0;
  for (int64_t bucket = 0; bucket < static_cast<int64_t>(plan.buckets.size()); ++bucket) {
    const Range owned = shard_range(plan, bucket, dp_rank);
    append_pieces(plan, bucket, owned, local_start, pieces);
    local_start += owned.numel();
  }
  MC_INVARIANT(local_start == plan.shard_numel(),
               "the slices of rank {} hold {} elements, its shard {}", dp_rank, local_start,
               plan.shard_numel());
  return pieces;
}

std::string to_text(const BufferPlan& plan, int64_t dp_rank) {
  std::ostringstream text;
  const std::vector<ShardPiece> pieces = shard_pieces(plan, dp_rank);
  text << "shard " << dp_rank << " of " << plan.dp_size << ": " << plan.shard_numel()
       << " elements\n";
  for (const ShardPiece& piece : pieces) {
    text << "  param " << piece.param_index << " bucket " << piece.bucket << " world "
         << piece.world << " bucket_range " << piece.bucket_range << " local " << piece.local
         << " param_range " << piece.param << "\n";
  }
  return text.str();
}

}  // namespace megacore::buffer
