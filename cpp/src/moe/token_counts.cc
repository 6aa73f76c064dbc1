#include "megacore/moe/token_counts.h"

#include <algorithm>
#include <string>

#include "megacore/base/check.h"
#include "megacore/base/vector_clones.h"

namespace megacore::moe {
namespace {

std::string nearest_multiples(int64_t value, int64_t unit) {
  const int64_t below = value / unit * unit;
  return below == 0 ? base::format_text("{}", unit)
                    : base::format_text("{} or {}", below, below + unit);
}

[[noreturn]] void report_negative(const TokenCounts& counts) {
  const int64_t size = counts.num_ranks * counts.num_experts;
  const int64_t* found =
      std::find_if(counts.tokens, counts.tokens + size, [](int64_t count) { return count < 0; });
  const int64_t index = found - counts.tokens;
  throw std::invalid_argument(base::format_text(
      "the count of rank {} for expert {} is {}; a number of tokens is at least 0",
      index / counts.num_experts, index % counts.num_experts, *found));
}

void require_within_limit(int64_t tokens) {
  MC_REQUIRE(tokens <= kMaxTokensPerExpert,
             "an expert has more than {} tokens, which is the most that the planner takes",
             kMaxTokensPerExpert);
}

MC_VECTOR_CLONES int64_t union_of_bits(const int64_t* row, int64_t numel) {
  int64_t bits = 0;
  for (int64_t i = 0; i < numel; ++i) {
    bits |= row[i];
  }
  return bits;
}

// Adds the row to the sums and returns the union of the bits of these.
MC_VECTOR_CLONES int64_t add_row(const int64_t* __restrict__ row,
                                 int64_t numel,
                                 int64_t* __restrict__ sums) {
  int64_t bits = 0;
  for (int64_t i = 0; i < numel; ++i) {
    sums[i] += row[i];
    bits |= sums[i];
  }
  return bits;
}

}  // namespace

void require_counts_shape(const TokenCounts& counts) {
  MC_REQUIRE(counts.num_ranks >= 1 && counts.num_experts >= 1,
             "the counts have shape ({}, {}), ranks x experts; both must be at least 1",
             counts.num_ranks, counts.num_experts);
  MC_REQUIRE(
      counts.num_experts % counts.num_ranks == 0,
      "{} experts do not divide over {} ranks; the nearest numbers of experts that do are {}",
      counts.num_experts, counts.num_ranks,
      nearest_multiples(counts.num_experts, counts.num_ranks));
  MC_REQUIRE(counts.num_experts <= kMaxExperts, "{} experts; the planner takes at most {}",
             counts.num_experts, kMaxExperts);
}

int64_t Loads::highest() const { return *std::max_element(ranks.begin(), ranks.end()); }

Loads sum_loads(const TokenCounts& counts) {
  require_counts_shape(counts);
  Loads loads{.experts = std::vector<int64_t>(static_cast<size_t>(counts.num_experts), 0),
              .ranks = std::vector<int64_t>(static_cast<size_t>(counts.num_ranks), 0)};
  for (int64_t rank = 0; rank < counts.num_ranks; ++rank) {
    const int64_t* row = counts.tokens + rank * counts.num_experts;
    // The union of the bits is negative when one count is, and above the limit, which is all ones,
    // when one count is: one pass without branches.
    const int64_t bits = union_of_bits(row, counts.num_experts);
    if (bits < 0) {
      report_negative(counts);
    }
    require_within_limit(bits);
    require_within_limit(add_row(row, counts.num_experts, loads.experts.data()));
  }
  for (int64_t expert = 0; expert < counts.num_experts; ++expert) {
    const int64_t tokens = loads.experts[static_cast<size_t>(expert)];
    loads.ranks[static_cast<size_t>(counts.home(expert))] += tokens;
    loads.total += tokens;
  }
  return loads;
}

}  // namespace megacore::moe
