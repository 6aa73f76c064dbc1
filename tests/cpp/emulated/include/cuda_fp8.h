// CUDA's conversion of two floats to e4m3, by ours.

#pragma once

#include "megacore/base/low_precision.h"

// NOLINTBEGIN(bugprone-reserved-identifier): CUDA's own names
inline constexpr int __NV_SATFINITE = 1;
inline constexpr int __NV_E4M3 = 0;

struct float2 {
  float x;
  float y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint16_t __nv_cvt_float2_to_fp8x2(float2 value, int, int) {
  return static_cast<uint16_t>(megacore::base::float8_bits(value.x) |
                               megacore::base::float8_bits(value.y) << 8);
}
// NOLINTEND(bugprone-reserved-identifier)
