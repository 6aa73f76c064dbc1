// CUDA's conversions of bfloat16, by ours.

#pragma once

#include "megacore/base/low_precision.h"

struct EmulatedBfloat16 {
  uint16_t bits;
};
inline EmulatedBfloat16 __float2bfloat16_rn(float value) {
  return {megacore::base::bfloat16_bits(value)};
}
inline uint16_t __bfloat16_as_ushort(EmulatedBfloat16 value) { return value.bits; }
