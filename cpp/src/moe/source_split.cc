#include "megacore/moe/source_split.h"

#include <algorithm>
#include <numeric>

#include "megacore/base/check.h"
#include "megacore/moe/documented.h"
#include "megacore/moe/planner_math.h"

namespace megacore::moe {
namespace {

int64_t sum(std::span<const int64_t> values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

// What sources have left and amounts miss once `shares` (sources, amounts) are given.
void take(std::span<const int64_t> shares,
          std::vector<int64_t>& tokens,
          std::vector<int64_t>& amounts) {
  for (size_t source = 0; source < tokens.size(); ++source) {
    for (size_t j = 0; j < amounts.size(); ++j) {
      const int64_t share = shares[source * amounts.size() + j];
      tokens[source] -= share;
      amounts[j] -= share;
    }
  }
}

}  // namespace

std::vector<int64_t> breadth_first_shares(std::span<const int64_t> tokens,
                                          std::span<const int64_t> amounts) {
  const int64_t total = sum(tokens);
  std::vector<int64_t> shares(tokens.size() * amounts.size(), 0);
  for (size_t source = 0; source < tokens.size(); ++source) {
    if (tokens[source] == 0) {
      continue;
    }
    for (size_t j = 0; j < amounts.size(); ++j) {
      shares[source * amounts.size() + j] = proportional_floor(tokens[source], amounts[j], total);
    }
  }
  return shares;
}

std::vector<int64_t> depth_first_shares(std::span<const int64_t> tokens_left,
                                        std::span<const int64_t> missing) {
  std::vector<int64_t> shares(tokens_left.size() * missing.size(), 0);
  for (const Piece& piece : interval_overlap(tokens_left, missing)) {
    shares[static_cast<size_t>(piece.chunk) * missing.size() + static_cast<size_t>(piece.bucket)] =
        piece.tokens;
  }
  return shares;
}

std::vector<int64_t> split_expert(std::span<const int64_t> tokens,
                                  int64_t home,
                                  std::span<const Clone> clones,
                                  bool locality_first) {
  std::vector<int64_t> left(tokens.begin(), tokens.end());
  std::vector<int64_t> missing;
  missing.reserve(clones.size());
  for (const Clone& clone : clones) {
    missing.push_back(clone.tokens);
  }
  const int64_t stays_home = sum(left) - sum(missing);
  std::vector<int64_t> shares(left.size() * missing.size(), 0);
  if (locality_first) {
    for (size_t j = 0; j < clones.size(); ++j) {
      const auto source = static_cast<size_t>(clones[j].rank);
      shares[source * missing.size() + j] = smaller(left[source], missing[j]);
    }
    take(shares, left, missing);
    left[static_cast<size_t>(home)] -= smaller(left[static_cast<size_t>(home)], stays_home);
  }
  const std::vector<int64_t> floors = breadth_first_shares(left, missing);
  take(floors, left, missing);
  const std::vector<int64_t> rest = depth_first_shares(left, missing);
  take(rest, left, missing);
  for (size_t i = 0; i < shares.size(); ++i) {
    shares[i] += floors[i] + rest[i];
  }
  MC_INVARIANT(sum(missing) == 0 && *std::min_element(left.begin(), left.end()) >= 0,
               "expert ",
               clones.front().expert,
               " does not have the tokens its clones were promised");
  return shares;
}

std::vector<int64_t> split_sources(const TokenCounts& counts,
                                   std::vector<Clone> clones,
                                   int64_t num_spare_slots,
                                   bool locality_first) {
  std::sort(clones.begin(), clones.end(), [](const Clone& a, const Clone& b) {
    return a.expert != b.expert ? a.expert < b.expert : a.rank < b.rank;
  });
  std::vector<int64_t> rerouted(
      static_cast<size_t>(counts.num_ranks * counts.num_ranks * num_spare_slots), 0);
  std::vector<int64_t> tokens(static_cast<size_t>(counts.num_ranks));
  for (size_t first = 0, last = 0; first < clones.size(); first = last) {
    const int64_t expert = clones[first].expert;
    while (last < clones.size() && clones[last].expert == expert) {
      ++last;
    }
    for (int64_t source = 0; source < counts.num_ranks; ++source) {
      tokens[static_cast<size_t>(source)] = counts.at(source, expert);
    }
    const std::span<const Clone> group(clones.data() + first, last - first);
    const std::vector<int64_t> shares =
        split_expert(tokens, counts.home(expert), group, locality_first);
    for (size_t source = 0; source < tokens.size(); ++source) {
      int64_t* row =
          rerouted.data() + static_cast<int64_t>(source) * counts.num_ranks * num_spare_slots;
      for (size_t j = 0; j < group.size(); ++j) {
        row[group[j].rank * num_spare_slots + group[j].slot] = shares[source * group.size() + j];
      }
    }
  }
  return rerouted;
}

}  // namespace megacore::moe
