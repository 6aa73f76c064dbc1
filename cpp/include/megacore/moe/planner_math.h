// The integer arithmetic of the offload planners, shared by the CPU planner and a CUDA kernel.
//
// All functions are pure functions of a few integers. The CPU planner reduces over ranks and
// experts with loops, a kernel with warp reductions; because both reduce the keys of this header,
// both make the same decisions and return identical plans.
//
// Ranges, checked by the caller: one expert has fewer than 2^31 tokens, there are at most 2^16
// experts and ranks, so a load is below 2^47 and no product below leaves 63 bits.

#pragma once

#include <cstdint>

#include "megacore/base/host_device.h"

namespace megacore::moe {

inline constexpr int64_t kMaxTokensPerExpert = (int64_t{1} << 31) - 1;
inline constexpr int64_t kMaxExperts = int64_t{1} << 16;
inline constexpr int64_t kMillion = 1'000'000;

MC_HOST_DEVICE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
MC_HOST_DEVICE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// ---- loads
// ---------------------------------------------------------------------------------------

// floor(total * per_million / (10^6 * num_ranks)), exact without a 128-bit product.
// REQUIRES: 0 <= total < 2^47, 0 <= per_million <= 10^9, num_ranks >= 1.
MC_HOST_DEVICE int64_t scaled_average(int64_t total, int64_t num_ranks, int64_t per_million) {
  const int64_t scaled = total / kMillion * per_million + total % kMillion * per_million / kMillion;
  return scaled / num_ranks;
}

// The goal load of the balanced planner for every rank: the average rounded up, or the average plus
// the tolerance if that is larger.
MC_HOST_DEVICE int64_t goal_load(int64_t total, int64_t num_ranks, int64_t tolerance_per_million) {
  const int64_t average_rounded_up = total / num_ranks + (total % num_ranks != 0 ? 1 : 0);
  return larger(average_rounded_up,
                scaled_average(total, num_ranks, kMillion + tolerance_per_million));
}

// ---- splitting
// -----------------------------------------------------------------------------------

struct Interval {
  int64_t start = 0;
  int64_t end = 0;
};

// Length of the common part of two half-open intervals.
MC_HOST_DEVICE int64_t overlap(Interval a, Interval b) {
  return larger(0, smaller(a.end, b.end) - larger(a.start, b.start));
}

// floor(tokens * amount / total): the proportional share of `amount` from a source with `tokens` of
// an expert's `total` tokens; 0 if total is 0.
// REQUIRES: 0 <= tokens <= total <= kMaxTokensPerExpert, 0 <= amount <= total.
MC_HOST_DEVICE int64_t proportional_floor(int64_t tokens, int64_t amount, int64_t total) {
  return total == 0 ? 0 : tokens * amount / total;
}

// ---- keys: reductions that break ties by the lowest index
// ----------------------------------------

inline constexpr int kIndexBits = 16;
inline constexpr uint64_t kIndexMask = (uint64_t{1} << kIndexBits) - 1;

// The maximum of these keys names the largest value, and the lowest index among equal values.
MC_HOST_DEVICE uint64_t most_key(int64_t value, int64_t index) {
  return (static_cast<uint64_t>(value) << kIndexBits) | (kIndexMask - static_cast<uint64_t>(index));
}
MC_HOST_DEVICE int64_t index_of_most(uint64_t key) {
  return static_cast<int64_t>(kIndexMask - (key & kIndexMask));
}

// The minimum of these keys names the smallest value, and the lowest index among equal values.
MC_HOST_DEVICE uint64_t least_key(int64_t value, int64_t index) {
  return (static_cast<uint64_t>(value) << kIndexBits) | static_cast<uint64_t>(index);
}
MC_HOST_DEVICE int64_t index_of_least(uint64_t key) {
  return static_cast<int64_t>(key & kIndexMask);
}

// The maximum over a donor's experts selects the one to clone to move `wanted` tokens: the smallest
// with at least that many left, else the largest. 0 for an expert with nothing left.
MC_HOST_DEVICE uint64_t expert_key(int64_t remaining, int64_t wanted, int64_t index) {
  if (remaining == 0) {
    return 0;
  }
  const int64_t value = remaining >= wanted ? (int64_t{1} << 32) - remaining : remaining;
  return most_key(value, index);
}

// ---- the greedy rules of the balanced planner
// ----------------------------------------------------

// Choice of the giving rank (donor), the receiving rank (receiver) and the amount of one step.
// Slack is the room of a rank below the goal, surplus its load above it.
enum class Rule : int {
  kTightFit = 0,   // the fullest rank first, until it is done; the tightest slack that covers its
                   // surplus, else the widest
  kBudgeted = 1,   // as kTightFit while the room this wastes can be spared; else fill the widest
  kBestFill = 2,   // the rank whose largest expert fills the widest slack best
  kWholeRank = 3,  // the fullest rank fills the widest slack alone: never misses the goal when
                   // there are as many slots as experts per rank
};
inline constexpr int kNumRules = 4;

// A rank that could receive tokens; rank -1 means none.
struct Receiver {
  int64_t rank = -1;
  int64_t slack = 0;
  int64_t slots_left = 0;
};

struct Move {
  int64_t receiver = -1;
  int64_t tokens = 0;  // wanted; a step moves fewer when the expert has fewer
};

// What to move from a donor with `surplus` > 0, given the receiver with the widest slack and the
// one with the tightest slack that covers the surplus (or none).
// `spare_room` is what may still be wasted: the room in receivers less the surplus of donors.
// REQUIRES: widest.rank >= 0.
MC_HOST_DEVICE Move
choose_move(Rule rule, int64_t surplus, Receiver widest, Receiver tightest, int64_t spare_room) {
  if (tightest.rank >= 0) {
    const int64_t wasted = tightest.slots_left == 1 ? tightest.slack - surplus : 0;
    if (rule == Rule::kTightFit || (rule == Rule::kBudgeted && wasted <= spare_room)) {
      return {tightest.rank, surplus};
    }
  }
  return {widest.rank, widest.slack};
}

// Score of a finished greedy run; lower is better, the first difference decides.
struct Score {
  int64_t load = 0;       // the highest load of a rank, but at least the goal
  int64_t crossings = 0;  // clones outside the domain of their home
  int64_t clones = 0;
  int64_t sends = 0;  // clones of one rank's experts, at most
  int64_t max_load = 0;
};

MC_HOST_DEVICE bool better(const Score& a, const Score& b) {
  if (a.load != b.load) {
    return a.load < b.load;
  }
  if (a.crossings != b.crossings) {
    return a.crossings < b.crossings;
  }
  if (a.clones != b.clones) {
    return a.clones < b.clones;
  }
  if (a.sends != b.sends) {
    return a.sends < b.sends;
  }
  return a.max_load < b.max_load;
}

// If the goal was missed, further goals between it and the best load so far are tried.
inline constexpr int kRefinementRounds = 3;
inline constexpr int kGoalsPerRound = 8;

// The `index`-th goal of a round, 0 <= index < kGoalsPerRound, strictly between two loads that are
// far enough apart, and never above `reached - 1`.
MC_HOST_DEVICE int64_t refined_goal(int64_t missed, int64_t reached, int64_t index) {
  return smaller(reached - 1, missed + 1 + (reached - missed) * index / kGoalsPerRound);
}

}  // namespace megacore::moe
