#include "megacore/parallel/rank_generator.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "megacore/base/check.h"
#include "megacore/base/intmath.h"

namespace megacore::parallel {

std::span<const int32_t> RankGroups::group(int64_t index) const {
  MC_REQUIRE(0 <= index && index < num_groups, "group {} does not exist; there are {} groups",
             index, num_groups);
  return std::span(ranks).subspan(static_cast<size_t>(index * group_size),
                                  static_cast<size_t>(group_size));
}

RankGenerator::RankGenerator(std::vector<AxisSize> layout, int64_t rank_offset)
    : layout_(std::move(layout)), rank_offset_(rank_offset), world_size_(1) {
  for (size_t i = 0; i < layout_.size(); ++i) {
    const AxisSize& entry = layout_[i];
    MC_REQUIRE(entry.size >= 1, "{} is {}; an axis size must be at least 1", entry.axis,
               entry.size);
    for (size_t j = 0; j < i; ++j) {
      MC_REQUIRE(layout_[j].axis != entry.axis, "axis {} occurs twice in the layout", entry.axis);
    }
    strides_.push_back(world_size_);
    world_size_ = base::checked_mul(world_size_, entry.size);
  }
  constexpr int64_t kMaxRank = std::numeric_limits<int32_t>::max();
  MC_REQUIRE(rank_offset_ >= 0, "rank_offset must be at least 0, got {}", rank_offset_);
  MC_REQUIRE(world_size_ <= kMaxRank && rank_offset_ <= kMaxRank - world_size_,
             "a layout of {} ranks from rank_offset {} on is too large: ranks must stay below {}",
             product_text(layout_), rank_offset_, kMaxRank);
}

std::vector<bool> RankGenerator::mask(std::string_view token) const {
  const std::vector<std::string> axes = parse_token(token, layout_);
  std::vector<bool> result;
  for (const AxisSize& entry : layout_) {
    result.push_back(std::ranges::find(axes, entry.axis) != axes.end());
  }
  return result;
}

std::vector<int32_t> RankGenerator::offsets(const std::vector<bool>& mask, bool wanted) const {
  // Each axis repeats what the faster axes reached, once per position, shifted by its stride.
  std::vector<int32_t> result{0};
  for (size_t i = 0; i < layout_.size(); ++i) {
    if (mask[i] != wanted) {
      continue;
    }
    const size_t reached = result.size();
    result.reserve(reached * static_cast<size_t>(layout_[i].size));
    for (int64_t position = 1; position < layout_[i].size; ++position) {
      const auto shift = static_cast<int32_t>(position * strides_[i]);
      for (size_t k = 0; k < reached; ++k) {
        result.push_back(result[k] + shift);
      }
    }
  }
  return result;
}

int64_t RankGenerator::stride(std::string_view axis) const {
  const std::vector<bool> wanted = mask(axis);
  MC_REQUIRE(std::ranges::count(wanted, true) == 1, "\"{}\" is not one axis", axis);
  return strides_[static_cast<size_t>(std::ranges::find(wanted, true) - wanted.begin())];
}

int64_t RankGenerator::group_size(std::string_view token) const {
  const std::vector<bool> varies = mask(token);
  int64_t size = 1;
  for (size_t i = 0; i < layout_.size(); ++i) {
    size *= varies[i] ? layout_[i].size : 1;
  }
  return size;
}

RankGroups RankGenerator::groups(std::string_view token) const {
  const std::vector<bool> varies = mask(token);
  const std::vector<int32_t> members = offsets(varies, true);
  const std::vector<int32_t> starts = offsets(varies, false);
  std::vector<int32_t> ranks(static_cast<size_t>(world_size_));
  const auto offset = static_cast<int32_t>(rank_offset_);
  int32_t* next = ranks.data();
  for (const int32_t start : starts) {
    const int32_t first = offset + start;
    for (const int32_t member : members) {
      *next++ = first + member;
    }
  }
  return {.num_groups = static_cast<int64_t>(starts.size()),
          .group_size = static_cast<int64_t>(members.size()),
          .ranks = std::move(ranks)};
}

std::vector<int32_t> RankGenerator::group_of(int64_t rank, std::string_view token) const {
  const std::vector<bool> varies = mask(token);
  const std::vector<int64_t> position = coordinates(rank);
  int64_t first = rank;
  for (size_t i = 0; i < layout_.size(); ++i) {
    first -= varies[i] ? position[i] * strides_[i] : 0;
  }
  std::vector<int32_t> ranks = offsets(varies, true);
  for (int32_t& member : ranks) {
    member += static_cast<int32_t>(first);
  }
  return ranks;
}

std::vector<int64_t> RankGenerator::coordinates(int64_t rank) const {
  MC_REQUIRE(rank_offset_ <= rank && rank < rank_offset_ + world_size_,
             "rank {} is outside this layout, which has ranks {} to {}", rank, rank_offset_,
             rank_offset_ + world_size_ - 1);
  std::vector<int64_t> result;
  for (size_t i = 0; i < layout_.size(); ++i) {
    result.push_back((rank - rank_offset_) / strides_[i] % layout_[i].size);
  }
  return result;
}

int64_t RankGenerator::rank(std::span<const int64_t> coordinates) const {
  MC_REQUIRE(coordinates.size() == layout_.size(), "got {} coordinates for a layout of {} axes",
             coordinates.size(), layout_.size());
  int64_t result = rank_offset_;
  for (size_t i = 0; i < layout_.size(); ++i) {
    MC_REQUIRE(0 <= coordinates[i] && coordinates[i] < layout_[i].size,
               "{} coordinate {} is outside [0, {})", layout_[i].axis, coordinates[i],
               layout_[i].size);
    result += coordinates[i] * strides_[i];
  }
  return result;
}

}  // namespace megacore::parallel
