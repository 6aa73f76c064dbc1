// CUDA's conversions of float16, by ours.

#pragma once

#include "megacore/base/low_precision.h"

struct EmulatedFloat16 {
  uint16_t bits;
};
inline EmulatedFloat16 __float2half_rn(float value) {
  return {megacore::base::float16_bits(value)};
}
inline uint16_t __half_as_ushort(EmulatedFloat16 value) { return value.bits; }
inline EmulatedFloat16 __ushort_as_half(uint16_t bits) { return {bits}; }
inline float __half2float(EmulatedFloat16 value) {
  return megacore::base::float_of_float16(value.bits);
}
