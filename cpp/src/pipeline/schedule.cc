#include "megacore/pipeline/schedule.h"

#include <algorithm>
#include <bit>

#include "megacore/base/check.h"

namespace megacore::pipeline {

std::span<const Action> Schedule::rank_actions(int rank) const {
  MC_REQUIRE(rank >= 0 && rank < num_ranks(), "rank {} is outside 0..{}", rank, num_ranks() - 1);
  const auto begin = static_cast<size_t>(offsets[static_cast<size_t>(rank)]);
  const auto end = static_cast<size_t>(offsets[static_cast<size_t>(rank) + 1]);
  return std::span(actions).subspan(begin, end - begin);
}

std::vector<std::span<const Action>> Schedule::rows() const {
  std::vector<std::span<const Action>> rows;
  for (int rank = 0; rank < num_ranks(); ++rank) rows.push_back(rank_actions(rank));
  return rows;
}

std::vector<int64_t> overlap_positions(const Schedule& schedule, int rank) {
  const auto num_actions = static_cast<int64_t>(schedule.rank_actions(rank).size());
  const int64_t begin = schedule.offsets[static_cast<size_t>(rank)];
  const auto first = std::lower_bound(schedule.overlaps.begin(), schedule.overlaps.end(), begin);
  std::vector<int64_t> positions;
  for (auto at = first; at != schedule.overlaps.end() && *at < begin + num_actions; ++at) {
    positions.push_back(*at - begin);
  }
  return positions;
}

std::vector<int32_t> order_list(const Schedule& schedule, int rank) {
  std::vector<int32_t> order;
  for (const Action& action : schedule.rank_actions(rank)) {
    const int32_t token = schedule.placement.chunk_of(action.stage) + 1;
    if (action.kind == ActionKind::kForward) order.push_back(token);
    if (gives_input_gradient(action.kind)) order.push_back(-token);
  }
  return order;
}

uint64_t digest(const Schedule& schedule) {
  uint64_t hash = 0;
  const auto add = [&](uint64_t word) {
    // Constants of xxHash64; every bit of a word reaches every bit of the hash within a few words.
    hash = std::rotl(hash ^ word * 0x9E3779B185EBCA87U, 27) * 0xC2B2AE3D27D4EB4FU + 1;
  };
  const Placement& placement = schedule.placement;
  add(static_cast<uint64_t>(placement.num_chains()));
  for (int stage = 0; stage < schedule.num_stages(); ++stage) {
    add(static_cast<uint64_t>(placement.rank_of(stage)));
  }
  add(static_cast<uint64_t>(schedule.num_microbatches) << 1 | (schedule.forward_only ? 1U : 0U));
  for (const int64_t offset : schedule.offsets) add(static_cast<uint64_t>(offset));
  for (const Action& action : schedule.actions) {
    add(static_cast<uint64_t>(action.stage) << 36 | static_cast<uint64_t>(action.kind) << 32 |
        static_cast<uint32_t>(action.microbatch));
  }
  for (const int64_t index : schedule.overlaps) add(static_cast<uint64_t>(index));
  return hash ^ hash >> 32;
}

}  // namespace megacore::pipeline
