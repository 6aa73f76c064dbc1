// Tokens from each expert-parallel rank's router to each expert: the input of planners.
//
// Experts are numbered over all ranks; rank p is the home of the contiguous experts
// [p * experts_per_rank, (p + 1) * experts_per_rank). A token that chose k experts counts k times.

#pragma once

#include <cstdint>
#include <vector>

#include "megacore/moe/planner_math.h"

namespace megacore::moe {

// A view of a (num_ranks, num_experts) row-major matrix; row r has the tokens sent by rank r.
struct TokenCounts {
  const int64_t* tokens = nullptr;
  int64_t num_ranks = 1;
  int64_t num_experts = 1;

  int64_t at(int64_t rank, int64_t expert) const { return tokens[rank * num_experts + expert]; }
  int64_t experts_per_rank() const { return num_experts / num_ranks; }
  int64_t home(int64_t expert) const { return expert / experts_per_rank(); }
};

struct Loads {
  std::vector<int64_t> experts;  // (num_experts,) tokens of each expert, from all ranks
  std::vector<int64_t> ranks;    // (num_ranks,) tokens of each rank's home experts
  int64_t total = 0;

  int64_t highest() const;  // of `ranks`
};

// Throws std::invalid_argument if the number of experts is not a positive multiple of the number of
// ranks or above kMaxExperts.
void require_counts_shape(const TokenCounts& counts);

// Sums the counts. O(num_ranks * num_experts).
// Throws std::invalid_argument for a bad shape (see require_counts_shape), if a count is negative,
// or an expert has more than kMaxTokensPerExpert.
Loads sum_loads(const TokenCounts& counts);

}  // namespace megacore::moe
