// SplitMix64: random numbers that are the same on every machine.
// Source: Steele et al., Fast splittable pseudorandom number generators, OOPSLA 2014.

#pragma once

#include <cstdint>

#include "megacore/base/host_device.h"

namespace megacore::base {

// What the state grows by with each number.
inline constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

// The number of a state.
MC_HOST_DEVICE uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

}  // namespace megacore::base
