// Integer arithmetic of the planners. Results are exact; otherwise an exception is thrown.

#pragma once

#include <cstdint>
#include <numeric>

#include "megacore/base/check.h"

namespace megacore::base {

// a * b; throws std::invalid_argument when the product leaves int64.
// REQUIRES: a >= 0, b >= 0.
inline int64_t checked_mul(int64_t a, int64_t b) {
  int64_t product = 0;
  MC_REQUIRE(!__builtin_mul_overflow(a, b, &product), "the product {} x {} does not fit 64 bits", a,
             b);
  return product;
}

// Smallest q with q * divisor >= value. REQUIRES: value >= 0, divisor >= 1.
constexpr int64_t ceil_div(int64_t value, int64_t divisor) {
  return value / divisor + (value % divisor != 0 ? 1 : 0);
}

// Smallest multiple of `alignment` that is >= value. REQUIRES: value >= 0, alignment >= 1.
constexpr int64_t align_up(int64_t value, int64_t alignment) {
  return ceil_div(value, alignment) * alignment;
}

}  // namespace megacore::base
