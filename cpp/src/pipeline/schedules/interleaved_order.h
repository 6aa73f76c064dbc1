// The family of interleaved orders: a table of (microbatch, chunk) pairs, a warmup count per rank
// and a way to run backwards. Private.

#pragma once

#include <optional>
#include <string>

#include "megacore/pipeline/schedule.h"

namespace megacore::pipeline {

enum class BackwardStyle : uint8_t {
  kFused,      // B
  kSplit,      // I, then W at once
  kLateWeight  // I; rank r runs W r backwards later
};

constexpr int actions_per_stage(BackwardStyle style) {
  return style == BackwardStyle::kFused ? 2 : 3;
}

struct InterleavedOrder {
  std::string name;
  int num_ranks;
  int num_chunks;
  int num_microbatches;
  int group_size;
  int warmup_multiplier;
  int smallest_group = 1;  // groups below are not offered
  BackwardStyle backward;
  bool pairs = false;  // forwards behind the warmup overlap with the backwards that follow them
};

int warmup_of(const InterleavedOrder& order, int rank);

Schedule build(const InterleavedOrder& order);

// Whether the order runs to its end. O(1) where that is known, else O(actions).
bool runs(const InterleavedOrder& order);

// Builds the order. Throws std::invalid_argument with the nearest legal values when it deadlocks.
Schedule build_or_refuse(const InterleavedOrder& order);

}  // namespace megacore::pipeline
