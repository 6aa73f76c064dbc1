// Bits of bfloat16 and float16: exact conversion to fp32, and rounding from it to nearest even.
//
//   float_of_bfloat16(bfloat16_bits(1.0F)) == 1.0F
//
// No branches: loops over these functions vectorise. A NaN stays a NaN (its payload may change),
// and subnormal numbers are kept even if the CPU flushes those of fp32 to zero.

#pragma once

#include <cstdint>
#include <cstring>

#include "megacore/base/host_device.h"

namespace megacore::base {

MC_HOST_DEVICE uint32_t bits_of_float(float value) {
  uint32_t bits = 0;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

MC_HOST_DEVICE float float_of_bits(uint32_t bits) {
  float value = 0.0F;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

MC_HOST_DEVICE float float_of_bfloat16(uint16_t bits) {
  return float_of_bits(static_cast<uint32_t>(bits) << 16);
}

// Nearest bfloat16 (ties to even), as its bits.
MC_HOST_DEVICE uint16_t bfloat16_bits(float value) {
  const uint32_t bits = bits_of_float(value);
  const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;
  const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  return static_cast<uint16_t>(is_nan ? 0x7fc0U : rounded);
}

MC_HOST_DEVICE float float_of_float16(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7fffU;
  const uint32_t sign = (bits & 0x8000U) << 16;
  const uint32_t shifted = magnitude << 13;  // the mantissa is in place, the exponent is 112 short
  // Below 2^-14 the value is an integer multiple of 2^-24.
  const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24F;
  const uint32_t normal = shifted + (112U << 23);
  const uint32_t special = shifted | 0x7f800000U;  // infinity and NaN
  const uint32_t large = magnitude >= 0x7c00U ? special : normal;
  return float_of_bits(sign | (magnitude < 0x0400U ? bits_of_float(small) : large));
}

// Nearest float16 (ties to even), as its bits; from 65520 on infinity.
MC_HOST_DEVICE uint16_t float16_bits(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t magnitude = bits & 0x7fffffffU;
  const uint32_t sign = (bits >> 16) & 0x8000U;
  // Next to 0.5 neighbours are 2^-24 apart, as the subnormal numbers of float16 are: adding 0.5
  // rounds.
  const uint32_t small = bits_of_float(float_of_bits(magnitude) + 0.5F) - bits_of_float(0.5F);
  const uint32_t rounded = magnitude + 0x0fffU + ((magnitude >> 13) & 1U);
  const uint32_t normal = (rounded - (112U << 23)) >> 13;
  const uint32_t special = magnitude > 0x7f800000U ? 0x7e00U : 0x7c00U;
  const uint32_t large = magnitude >= 0x477ff000U ? special : normal;
  return static_cast<uint16_t>(sign | (magnitude < 0x38800000U ? small : large));
}

}  // namespace megacore::base
