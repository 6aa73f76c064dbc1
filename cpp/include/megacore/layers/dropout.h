// Dropout whose mask is a function of the key of its use, the sample, the position in the sequence
// and the feature: the numbers of megacore.ops.counter_random (SplitMix64).

#pragma once

#include <cstdint>

#include "megacore/base/host_device.h"
#include "megacore/base/splitmix.h"

namespace megacore::layers {

using base::kGolden;
using base::mixed;

// First number of a token.
MC_HOST_DEVICE uint64_t start_of_token(int64_t key, int64_t sample, int64_t position) {
  const uint64_t of_sample =
      mixed(static_cast<uint64_t>(sample) * kGolden + static_cast<uint64_t>(key));
  return mixed(of_sample + static_cast<uint64_t>(position) * kGolden);
}

MC_HOST_DEVICE bool keeps(uint64_t start, int64_t feature, int64_t threshold) {
  const uint64_t number = mixed(start + static_cast<uint64_t>(feature + 1) * kGolden);
  return static_cast<int64_t>(number) >= threshold;
}

struct DropoutRule {
  int64_t sequence;
  int64_t batch;
  int64_t width;
  int64_t threshold;  // elements with a lower number are dropped
  float factor;       // of the others
};

// y (S, B, H) = x times the factor, rounded to its type, or times zero.
template <typename Float>
void dropout(const Float* x,
             const int64_t* sample_ids,  // (B)
             const int64_t* positions,   // (S)
             int64_t key,
             const DropoutRule& rule,
             Float* y,
             int num_threads);

}  // namespace megacore::layers
