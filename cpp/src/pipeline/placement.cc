#include "megacore/pipeline/placement.h"

#include <algorithm>
#include <utility>

#include "megacore/base/check.h"

namespace megacore::pipeline {
namespace {

// 0 1 .. p-1 p-1 .. 1 0
std::vector<int32_t> there_and_back(int num_ranks) {
  MC_REQUIRE(num_ranks >= 1, "num_ranks must be at least 1, got {}", num_ranks);
  std::vector<int32_t> ranks;
  ranks.reserve(2 * static_cast<size_t>(num_ranks));
  for (int rank = 0; rank < num_ranks; ++rank) ranks.push_back(rank);
  for (int rank = num_ranks - 1; rank >= 0; --rank) ranks.push_back(rank);
  return ranks;
}

}  // namespace

Placement Placement::loop(const LoopShape& shape) {
  MC_REQUIRE(shape.num_ranks >= 1, "num_ranks must be at least 1, got {}", shape.num_ranks);
  MC_REQUIRE(shape.num_chunks >= 1, "num_chunks must be at least 1, got {}", shape.num_chunks);
  std::vector<int32_t> ranks;
  ranks.reserve(static_cast<size_t>(shape.num_ranks) * static_cast<size_t>(shape.num_chunks));
  for (int chunk = 0; chunk < shape.num_chunks; ++chunk) {
    for (int rank = 0; rank < shape.num_ranks; ++rank) ranks.push_back(rank);
  }
  return Placement(std::move(ranks));
}

Placement Placement::v(const RankShape& shape) {
  return Placement(there_and_back(shape.num_ranks));
}

Placement Placement::bidirectional(const RankShape& shape) {
  return Placement(there_and_back(shape.num_ranks), 2);
}

Placement::Placement(std::vector<int32_t> stage_ranks, int num_chains)
    : stage_ranks_(std::move(stage_ranks)) {
  MC_REQUIRE(!stage_ranks_.empty(), "a placement needs at least one stage");
  MC_REQUIRE(num_chains >= 1 && num_stages() % num_chains == 0,
             "num_chains must be at least 1 and divide the {} stages, got {}", num_stages(),
             num_chains);
  chain_length_ = num_stages() / num_chains;
  const auto [lowest, highest] = std::minmax_element(stage_ranks_.begin(), stage_ranks_.end());
  MC_REQUIRE(*lowest >= 0, "a stage is placed on rank {}; ranks start at 0", *lowest);
  MC_REQUIRE(*highest < num_stages(),
             "a stage is placed on rank {}, but {} stages can use ranks 0..{} at most", *highest,
             num_stages(), num_stages() - 1);

  const size_t num_ranks = static_cast<size_t>(*highest) + 1;
  std::vector<int32_t> counts(num_ranks, 0);
  stage_chunks_.reserve(stage_ranks_.size());
  for (const int32_t rank : stage_ranks_) {
    stage_chunks_.push_back(counts[static_cast<size_t>(rank)]++);
  }
  rank_begin_.assign(num_ranks + 1, 0);
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    MC_REQUIRE(counts[rank] > 0, "rank {} has no stage, but rank {} has one", rank, *highest);
    rank_begin_[rank + 1] = rank_begin_[rank] + counts[rank];
  }
  rank_stages_.resize(stage_ranks_.size());
  for (size_t stage = 0; stage < stage_ranks_.size(); ++stage) {
    const int32_t begin = rank_begin_[static_cast<size_t>(stage_ranks_[stage])];
    rank_stages_[static_cast<size_t>(begin + stage_chunks_[stage])] = static_cast<int32_t>(stage);
  }
}

int Placement::num_chunks() const {
  return *std::max_element(stage_chunks_.begin(), stage_chunks_.end()) + 1;
}

std::span<const int32_t> Placement::stages_of(int rank) const {
  MC_REQUIRE(rank >= 0 && rank < num_ranks(), "rank {} is outside 0..{}", rank, num_ranks() - 1);
  const auto begin = static_cast<size_t>(rank_begin_[static_cast<size_t>(rank)]);
  const auto end = static_cast<size_t>(rank_begin_[static_cast<size_t>(rank) + 1]);
  return std::span(rank_stages_).subspan(begin, end - begin);
}

}  // namespace megacore::pipeline
