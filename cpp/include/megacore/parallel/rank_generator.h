// Global ranks of communication groups.
//
// Ranks form a dense grid with one dimension per parallel axis, the first axis varying fastest:
// rank = offset + sum(coordinate[i] * stride[i]), stride[i] = product of the sizes before i. A
// group over a set of axes varies those axes and fixes all others. The class is a value: no process
// group, no global state, no device; all functions are const and thread-safe.
//
//   const RankGenerator ranks({{"tp", 2}, {"dp", 2}, {"pp", 2}});
//   ranks.groups("dp");     // {0,2} {1,3} {4,6} {5,7}
//   ranks.groups("tp-dp");  // {0,1,2,3} {4,5,6,7}, the same as "dp-tp"
//
// Source: the mixed-radix rule of Megatron-LM's rank generator (arXiv:2104.04473, section 3).

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "megacore/parallel/axis_order.h"

namespace megacore::parallel {

// All groups of one token as one row-major matrix.
struct RankGroups {
  int64_t num_groups;
  int64_t group_size;
  std::vector<int32_t> ranks;  // num_groups * group_size global ranks

  // REQUIRES: 0 <= index < num_groups.
  std::span<const int32_t> group(int64_t index) const;

  friend bool operator==(const RankGroups&, const RankGroups&) = default;
};

class RankGenerator {
 public:
  // `layout` goes from the fastest-varying axis to the slowest; ranks are numbered from
  // `rank_offset`.
  // REQUIRES: axes are distinct, every size >= 1, rank_offset >= 0, and the last rank fits 31 bits.
  explicit RankGenerator(std::vector<AxisSize> layout, int64_t rank_offset = 0);

  int64_t world_size() const { return world_size_; }
  int64_t rank_offset() const { return rank_offset_; }
  std::span<const AxisSize> layout() const { return layout_; }

  // Distance between neighbours along `axis`. REQUIRES: `axis` is in the layout.
  int64_t stride(std::string_view axis) const;

  // Ranks per group of `token`. REQUIRES: `token` parses (see parse_token).
  int64_t group_size(std::string_view token) const;

  // All groups of `token`, in increasing order of their first rank; ranks inside a group increase.
  // The groups partition [rank_offset, rank_offset + world_size). O(world_size).
  // REQUIRES: `token` parses (see parse_token).
  RankGroups groups(std::string_view token) const;

  // The group of `token` that contains `rank`, increasing. O(group size).
  // REQUIRES: `rank` is in the layout and `token` parses.
  std::vector<int32_t> group_of(int64_t rank, std::string_view token) const;

  // Position of `rank` on every axis, in layout order. REQUIRES: `rank` is in the layout.
  std::vector<int64_t> coordinates(int64_t rank) const;

  // Inverse of coordinates().
  // REQUIRES: one coordinate per axis of the layout, each in [0, size).
  int64_t rank(std::span<const int64_t> coordinates) const;

  friend bool operator==(const RankGenerator&, const RankGenerator&) = default;

 private:
  // For each layout axis, whether `token` includes it.
  std::vector<bool> mask(std::string_view token) const;
  // Distances from the first rank reached by varying the axes where mask == `wanted`; increasing.
  std::vector<int32_t> offsets(const std::vector<bool>& mask, bool wanted) const;

  std::vector<AxisSize> layout_;
  std::vector<int64_t> strides_;  // one per axis
  int64_t rank_offset_;
  int64_t world_size_;
};

}  // namespace megacore::parallel
