// Bits of bfloat16, float16 and 8-bit floats: exact conversion of the first two to fp32, and
// rounding from it to nearest even.
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

// Nearest 8-bit float with 4 bits of exponent and 3 of mantissa (e4m3fn), as its bits; beyond 448
// it is 448. Every NaN becomes 0x7f.
MC_HOST_DEVICE uint8_t float8_bits(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t magnitude = bits & 0x7fffffffU;
  const uint32_t sign = (bits >> 24) & 0x80U;
  // Next to 2^14 neighbours are 2^-9 apart, as the subnormal numbers are: adding 2^14 rounds.
  const uint32_t small = bits_of_float(float_of_bits(magnitude) + 0x1p14F) - bits_of_float(0x1p14F);
  const uint32_t rounded = magnitude + 0x7ffffU + ((magnitude >> 20) & 1U);
  const uint32_t normal = (rounded - (120U << 23)) >> 20;
  const uint32_t large = magnitude >= 0x43e00000U ? 0x7eU : normal;
  const uint32_t finite = sign | (magnitude < 0x3c800000U ? small : large);
  return static_cast<uint8_t>(magnitude > 0x7f800000U ? 0x7fU : finite);
}

// Elements of a matrix that is computed in fp32: fp32, or the bits of bfloat16.
[[gnu::always_inline]] inline float widen(float value) { return value; }
[[gnu::always_inline]] inline float widen(uint16_t bits) { return float_of_bfloat16(bits); }
[[gnu::always_inline]] inline void narrow(float value, float& to) { to = value; }
[[gnu::always_inline]] inline void narrow(float value, uint16_t& to) { to = bfloat16_bits(value); }

// How elements of one type are stored, and in which type they are computed.
template <typename T>
struct Plain {
  using Stored = T;
  using Wide = T;
  static Wide widen(Stored value) { return value; }
  static Stored narrow(Wide value) { return value; }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Wide = float;
  static Wide widen(Stored bits) { return float_of_bfloat16(bits); }
  static Stored narrow(Wide value) { return bfloat16_bits(value); }
};

struct Float16 {
  using Stored = uint16_t;
  using Wide = float;
  static Wide widen(Stored bits) { return float_of_float16(bits); }
  static Stored narrow(Wide value) { return float16_bits(value); }
};

}  // namespace megacore::base
