// Split of a clone's tokens over source ranks: from tokens per clone to tokens per (source, clone).
//
// Every source first gives its proportional share, rounded down (breadth first); the remainder is
// then taken source by source in rank order (depth first). The result is exact: each clone gets
// precisely its tokens, no source gives more than it has.
//
// With `locality_first` a clone first gets the tokens of its own rank and the home expert those of
// its own rank, without communication; only the rest is split as above.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "megacore/moe/clone.h"
#include "megacore/moe/token_counts.h"

namespace megacore::moe {

// floor(tokens[r] * amounts[j] / total) for every source r and amount j; (sources, amounts).
// total is the sum of `tokens`. REQUIRES: every amount <= total.
//   breadth_first_shares({30, 50, 20}, {83}) == {24, 41, 16}
std::vector<int64_t> breadth_first_shares(std::span<const int64_t> tokens,
                                          std::span<const int64_t> amounts);

// The remainder, taken from the sources in rank order for one amount after the other: the interval
// overlap of the sources' remaining tokens and the missing amounts; (sources, amounts).
//   depth_first_shares({6, 9, 4}, {2}) == {2, 0, 0}
std::vector<int64_t> depth_first_shares(std::span<const int64_t> tokens_left,
                                        std::span<const int64_t> missing);

// Splits the clones of one expert: (sources, clones), in the order of `clones`.
// `tokens` has one entry per source rank. REQUIRES: the clones' tokens sum to at most the expert's,
// their ranks are distinct and not `home`.
std::vector<int64_t> split_expert(std::span<const int64_t> tokens,
                                  int64_t home,
                                  std::span<const Clone> clones,
                                  bool locality_first);

// Splits all clones: (source rank, destination rank, slot), tokens that do not stay at home.
// The clones of an expert are served by (rank, slot). O(clones * (log clones + ranks)) and the
// size of the result.
std::vector<int64_t> split_sources(const TokenCounts& counts,
                                   std::vector<Clone> clones,
                                   int64_t num_spare_slots,
                                   bool locality_first);

}  // namespace megacore::moe
