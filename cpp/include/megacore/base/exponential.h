// e^x in fp32 without branches or a call, so that loops over it vectorise.

#pragma once

#include "megacore/base/low_precision.h"

namespace megacore::base {

// x = n ln 2 + r with |r| <= ln 2 / 2; e^r is a Taylor polynomial whose first missing term is below
// 2^-25 of it. Saturates instead of overflowing: e^88 and e^-87 serve a sigmoid as infinity and
// zero. A NaN stays one.
[[gnu::always_inline]] inline float exponential(float x) {
  constexpr float kRound = 0x1.8p23F;  // adding it rounds to an integer, kept in the low bits
  x = x < -87.0F ? -87.0F : x;
  x = x > 88.0F ? 88.0F : x;
  const float shifted = x * 0x1.715476p+0F + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0x1.62e4p-1F) - n * 0x1.7f7d1cp-20F;
  float sum = 1.0F / 5040.0F;
  sum = sum * r + 1.0F / 720.0F;
  sum = sum * r + 1.0F / 120.0F;
  sum = sum * r + 1.0F / 24.0F;
  sum = sum * r + 1.0F / 6.0F;
  sum = sum * r + 0.5F;
  sum = sum * r + 1.0F;
  sum = sum * r + 1.0F;
  return sum * float_of_bits((bits_of_float(shifted) + 127U) << 23);
}

}  // namespace megacore::base
