// What the generators share. Private.

#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "megacore/base/check.h"
#include "megacore/pipeline/schedules/generators.h"

namespace megacore::pipeline {

// A generator is asked for at most this many actions (2^28 x 12 bytes = 3 GiB).
inline constexpr int64_t kMaxActions = int64_t{1} << 28;

// Sizes of a schedule that is too large.
struct TooLarge {
  int num_ranks;
  int num_chunks;
  int num_microbatches;
  int64_t most;        // ranks x chunks x microbatches
  int least_per_rank;  // microbatches
};

// Which one size to lower, and to what.
inline std::string advice_on(const TooLarge& sizes) {
  const int64_t microbatches = sizes.most / sizes.num_ranks / sizes.num_chunks;
  if (microbatches >= std::max(int64_t{1}, int64_t{sizes.least_per_rank} * sizes.num_ranks)) {
    return base::format_text("use fewer microbatches (at most {})", microbatches);
  }
  int64_t ranks = sizes.most / sizes.num_microbatches / sizes.num_chunks;
  if (sizes.least_per_rank > 0) {
    ranks = std::min<int64_t>(ranks, sizes.num_microbatches / sizes.least_per_rank);
  }
  if (ranks >= 1) return base::format_text("use fewer ranks (at most {})", ranks);
  const int64_t chunks = sizes.most / sizes.num_microbatches / sizes.num_ranks;
  if (chunks >= 1 && chunks < sizes.num_chunks) {
    return base::format_text("use fewer chunks (at most {})", chunks);
  }
  return base::format_text("the three sizes may multiply to at most {}", sizes.most);
}

// A microbatch takes `actions_per_stage` actions of each stage: 2 with a fused backward, else 3.
inline void require_sizes(int num_ranks,
                          int num_chunks,
                          int num_microbatches,
                          int actions_per_stage = 2,
                          int least_per_rank = 0) {
  MC_REQUIRE(num_ranks >= 1, "num_ranks must be at least 1, got {}", num_ranks);
  MC_REQUIRE(num_chunks >= 1, "num_chunks must be at least 1, got {}", num_chunks);
  MC_REQUIRE(num_microbatches >= 1, "num_microbatches must be at least 1, got {}",
             num_microbatches);
  const int64_t most = kMaxActions / actions_per_stage;
  MC_REQUIRE(int64_t{num_ranks} * num_chunks <= most / num_microbatches,
             "{} ranks x {} chunks x {} microbatches need more than {} actions; {}", num_ranks,
             num_chunks, num_microbatches, kMaxActions,
             advice_on({.num_ranks = num_ranks,
                        .num_chunks = num_chunks,
                        .num_microbatches = num_microbatches,
                        .most = most,
                        .least_per_rank = least_per_rank}));
}

// The generators in V placement work through about p slots per rank however few microbatches there
// are; this keeps p^2 within reason.
inline void require_v_ranks(int num_ranks) {
  constexpr int kMaxRanks = 4096;
  MC_REQUIRE(num_ranks <= kMaxRanks,
             "num_ranks is {}; schedules in V placement are made for up to {} ranks", num_ranks,
             kMaxRanks);
}

// A schedule whose rank r runs append_rank(r, actions).
template <typename AppendRank>
Schedule make_schedule(std::string name,
                       Placement placement,
                       int num_microbatches,
                       int actions_per_stage,
                       const AppendRank& append_rank) {
  Schedule schedule{.name = std::move(name),
                    .placement = std::move(placement),
                    .num_microbatches = num_microbatches,
                    .forward_only = false,
                    .actions = {},
                    .offsets = {0}};
  schedule.actions.reserve(static_cast<size_t>(actions_per_stage) *
                           static_cast<size_t>(schedule.num_stages()) *
                           static_cast<size_t>(num_microbatches));
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    append_rank(rank, schedule.actions);
    schedule.offsets.push_back(static_cast<int64_t>(schedule.actions.size()));
  }
  return schedule;
}

}  // namespace megacore::pipeline
