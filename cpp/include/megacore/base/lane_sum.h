// Sums in lanes, for functions that are compiled once per vector width.

#pragma once

#include <cstdint>

namespace megacore::base {

// Lanes let a sum vectorise; their number is fixed, so every processor adds in the same order.
inline constexpr int64_t kLanes = 16;

// Adds term(i) for i < count to kLanes lanes.
template <typename Term>
[[gnu::always_inline]] inline void add_to_lanes(int64_t count, const Term& term, float* lanes) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += term(i + lane);
    }
  }
  for (; i < count; ++i) {
    lanes[i % kLanes] += term(i);
  }
}

[[gnu::always_inline]] inline float sum_of_lanes(float* lanes) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

// Sum of term(i) for i < count, in an order that depends on the count only.
template <typename Term>
[[gnu::always_inline]] inline float sum(int64_t count, const Term& term) {
  float lanes[kLanes] = {};
  add_to_lanes(count, term, lanes);
  return sum_of_lanes(lanes);
}

}  // namespace megacore::base
