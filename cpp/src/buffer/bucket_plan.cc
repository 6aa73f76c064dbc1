#include "megacore/buffer/bucket_plan.h"

#include <algorithm>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "megacore/base/check.h"
#include "megacore/base/intmath.h"

namespace megacore::buffer {
namespace {

// Far above any real buffer, and small enough that aligning a position cannot overflow.
constexpr int64_t kMaxPosition = int64_t{1} << 60;

int64_t checked_position(int64_t position) {
  MC_REQUIRE(position <= kMaxPosition,
             "the buffer would end at element {}; at most 2^60 elements fit into one buffer",
             position);
  return position;
}

constexpr int64_t kRingUnit = int64_t{1} << 16;

int64_t resolve_bucket_alignment(const BucketPlanSpec& spec) {
  if (!spec.bucket_alignment.has_value()) {
    return std::lcm(spec.dp_size, spec.pad_for_ring ? kRingUnit : int64_t{128});
  }
  const int64_t alignment = *spec.bucket_alignment;
  MC_REQUIRE(alignment >= 1 && alignment % spec.dp_size == 0,
             "bucket_alignment must be a positive multiple of dp_size = {}, e.g. {}, got {}",
             spec.dp_size, base::align_up(std::max(alignment, int64_t{1}), spec.dp_size),
             alignment);
  if (spec.pad_for_ring) {
    MC_REQUIRE(alignment <= kMaxPosition / kRingUnit,
               "bucket_alignment is {}; with pad_for_ring it must be at most 2^44", alignment);
    return std::lcm(alignment, kRingUnit);
  }
  return alignment;
}

void check_spec(const BucketPlanSpec& spec) {
  MC_REQUIRE(spec.dp_size >= 1 && spec.dp_size <= (int64_t{1} << 40),
             "dp_size must be a number of ranks, at least 1, got {}", spec.dp_size);
  MC_REQUIRE(spec.bucket_numel.value_or(1) >= 1,
             "bucket_numel is {}; a bucket must hold at least 1 element",
             spec.bucket_numel.value_or(1));
  MC_REQUIRE(spec.param_alignment >= 1 && spec.param_alignment <= kMaxPosition,
             "param_alignment must be at least 1, got {}", spec.param_alignment);
  MC_REQUIRE(spec.bucket_alignment.value_or(1) <= kMaxPosition,
             "bucket_alignment must be at most 2^60, got {}", spec.bucket_alignment.value_or(1));
  MC_REQUIRE(spec.shared.empty() || spec.shared.size() == spec.numels.size(),
             "there are {} shared flags for {} parameters; give one flag per parameter, or none",
             spec.shared.size(), spec.numels.size());
  for (size_t i = 0; i < spec.numels.size(); ++i) {
    MC_REQUIRE(spec.numels[i] >= 0, "parameter {} has {} elements; a size cannot be negative", i,
               spec.numels[i]);
  }
}

// Fills a plan front to back; `cursor_` is where the next element goes.
class Layout {
 public:
  explicit Layout(BufferPlan plan) : plan_(std::move(plan)) {}

  void close_bucket() {
    if (open_.param_indices.empty()) {
      return;
    }
    open_.numel_unpadded = cursor_ - open_.start;
    cursor_ = checked_position(base::align_up(cursor_, plan_.bucket_alignment));
    open_.end = cursor_;
    plan_.buckets.push_back(std::move(open_));
    open_ = Bucket{.start = cursor_};
  }

  void place(int64_t index, int64_t numel) {
    const int64_t start = checked_position(base::align_up(cursor_, plan_.param_alignment));
    MC_REQUIRE(numel <= kMaxPosition, "parameter {} has {} elements", index, numel);
    cursor_ = checked_position(start + numel);
    plan_.param_ranges[static_cast<size_t>(index)] = {start, cursor_};
    open_.param_indices.push_back(index);
  }

  bool bucket_is_full() const { return cursor_ - open_.start >= plan_.bucket_numel; }

  BufferPlan finish() {
    close_bucket();
    plan_.numel = cursor_;
    return std::move(plan_);
  }

 private:
  BufferPlan plan_;
  Bucket open_ = {};
  int64_t cursor_ = 0;
};

}  // namespace

const Range& BufferPlan::param_range(int64_t index) const {
  if (index < 0 || index >= static_cast<int64_t>(param_ranges.size())) {
    throw std::out_of_range(base::format_text("parameter {} is not in this plan of {} parameters",
                                              index, param_ranges.size()));
  }
  return param_ranges[static_cast<size_t>(index)];
}

int64_t default_bucket_numel(int64_t dp_size) {
  return std::max(int64_t{40'000'000}, base::checked_mul(1'000'000, dp_size));
}

BufferPlan plan_buckets(const BucketPlanSpec& spec) {
  check_spec(spec);
  Layout layout(BufferPlan{
      .numel = 0,
      .dp_size = spec.dp_size,
      .bucket_numel = spec.bucket_numel.value_or(default_bucket_numel(spec.dp_size)),
      .param_alignment = spec.param_alignment,
      .bucket_alignment = resolve_bucket_alignment(spec),
      .param_ranges = std::vector<Range>(spec.numels.size()),
  });
  for (auto i = static_cast<int64_t>(spec.numels.size()) - 1; i >= 0; --i) {
    const auto index = static_cast<size_t>(i);
    const bool alone = !spec.shared.empty() && spec.shared[index];
    if (alone) {
      layout.close_bucket();
    }
    layout.place(i, spec.numels[index]);
    if (alone || layout.bucket_is_full()) {
      layout.close_bucket();
    }
  }
  return layout.finish();
}

std::string to_text(const BufferPlan& plan) {
  std::ostringstream text;
  text << "buffer: " << plan.param_ranges.size() << " parameters, " << plan.numel
       << " elements, dp " << plan.dp_size << "\n";
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    const Bucket& bucket = plan.buckets[b];
    text << "bucket " << b << " [" << bucket.start << ", " << bucket.end << ") unpadded "
         << bucket.numel_unpadded << "\n";
    for (const int64_t index : bucket.param_indices) {
      const Range& range = plan.param_range(index);
      text << "  param " << index << " [" << range.start << ", " << range.end << ")\n";
    }
  }
  return text.str();
}

}  // namespace megacore::buffer
