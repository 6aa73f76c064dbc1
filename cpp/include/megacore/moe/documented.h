// The offload planner of the ECHO documents, each intermediate value a pure function.
//
// Ranks above the average spill tokens, ranks below it have room. Both are sorted and laid on one
// line as intervals; where a spilled chunk overlaps a room, that many tokens move: one pass, no
// search. Each rank keeps the largest of its pieces, one per spare slot; the rest stays at home.
//
//   loads of 4 ranks        500 200 300 400        floor_average 350
//   spare_capacity            0 150  50   0
//   spilled per rank        150   0   0  50        (spillover says which experts)
//
// Where the documents are ambiguous: sorts are stable and the lowest index wins a tie, so every
// rank computes the same plan; pieces without room or slot stay on the home expert; all arithmetic
// is exact in integers.
//
// Source: Megatron-LM pull request 2368 ("ECHO"), arXiv:2603.07685 section 4.3.7.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "megacore/moe/clone.h"
#include "megacore/moe/token_counts.h"

namespace megacore::moe {

// floor(sum / count) of the ranks' loads. REQUIRES: not empty.
int64_t floor_average(std::span<const int64_t> rank_loads);

// Free room of each rank: max(0, average - load).
std::vector<int64_t> spare_capacity(std::span<const int64_t> rank_loads, int64_t average);

// Tokens to move away from each expert. In every rank the experts are sorted in ascending order
// (stable) and summed; the excess of the sum over `average` spills from the expert that causes it:
// the hottest experts spill first and at most one expert of a rank is split.
//   spillover({50, 100, 150, 200}, 1, 250) == {0, 0, 50, 200}
// REQUIRES: num_ranks divides the number of experts.
std::vector<int64_t> spillover(std::span<const int64_t> expert_loads,
                               int64_t num_ranks,
                               int64_t average);

// `tokens` of `chunk` lie in `bucket`.
struct Piece {
  int64_t chunk = 0;
  int64_t bucket = 0;
  int64_t tokens = 0;

  friend bool operator==(const Piece&, const Piece&) = default;
};

// Lays chunks and buckets end to end from 0, each on its own line, and returns every non-empty
// overlap, from left to right. O(chunks + buckets). REQUIRES: all sizes >= 0.
//   interval_overlap({100, 150}, {80, 120})  // chunk 0: 80 and 20, chunk 1: 0 and 100
std::vector<Piece> interval_overlap(std::span<const int64_t> chunks,
                                    std::span<const int64_t> buckets);

// interval_overlap of both sorted descending (stable); `chunk` is the expert, `bucket` the rank.
std::vector<Piece> assign_spillover(std::span<const int64_t> spillover,
                                    std::span<const int64_t> spare_capacity);

// Each rank's `num_spare_slots` largest pieces, the largest in slot 0; of equal ones the lowest
// expert first. By (rank, slot).
std::vector<Clone> top_pieces(const std::vector<Piece>& pieces, int64_t num_spare_slots);

// All of the above.
std::vector<Clone> plan_documented(const Loads& loads, int64_t num_spare_slots);

}  // namespace megacore::moe
