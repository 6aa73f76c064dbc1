#include "megacore/base/low_precision.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace megacore::base {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

bool is_float16_nan(uint32_t bits) { return (bits & 0x7fffU) > 0x7c00U; }
bool is_bfloat16_nan(uint32_t bits) { return (bits & 0x7fffU) > 0x7f80U; }

// The value by the definition of the format: sign, 5 bits of exponent, 10 of mantissa.
double float16_by_definition(uint32_t bits) {
  const double sign = (bits & 0x8000U) != 0 ? -1.0 : 1.0;
  const int exponent = static_cast<int>(bits >> 10 & 31U);
  const int mantissa = static_cast<int>(bits & 1023U);
  if (exponent == 31) {
    return sign * kInfinity;
  }
  return sign *
         (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(mantissa + 1024, exponent - 25));
}

TEST(LowPrecision, WidensEveryFloat16Exactly) {
  for (uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const float value = float_of_float16(static_cast<uint16_t>(bits));
    if (is_float16_nan(bits)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
    } else {
      ASSERT_EQ(double{value}, float16_by_definition(bits)) << bits;
      ASSERT_EQ(std::signbit(value), (bits & 0x8000U) != 0) << bits;
    }
  }
}

TEST(LowPrecision, EveryValueSurvivesTheWayToFloatAndBack) {
  for (uint32_t i = 0; i < 0x10000U; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    if (is_float16_nan(bits)) {
      ASSERT_TRUE(is_float16_nan(float16_bits(float_of_float16(bits))));
    } else {
      ASSERT_EQ(float16_bits(float_of_float16(bits)), bits);
    }
    if (is_bfloat16_nan(bits)) {
      ASSERT_TRUE(is_bfloat16_nan(bfloat16_bits(float_of_bfloat16(bits))));
    } else {
      ASSERT_EQ(bfloat16_bits(float_of_bfloat16(bits)), bits);
    }
  }
}

// Halfway points between neighbours go to the even one, everything else to the nearer one.
template <typename Round, typename Widen>
void expect_nearest(uint16_t low, Round round, Widen widen, int sign = 0x8000) {
  const auto high = static_cast<uint16_t>(low + 1);
  const double middle = (double{widen(low)} + double{widen(high)}) / 2;
  const auto at_middle = static_cast<float>(middle);
  ASSERT_EQ(double{at_middle}, middle);
  ASSERT_EQ(round(at_middle), low % 2 == 0 ? low : high) << low;
  ASSERT_EQ(round(std::nextafter(at_middle, 0.0F)), low) << low;
  ASSERT_EQ(round(std::nextafter(at_middle, kInfinity)), high) << low;
  ASSERT_EQ(round(-at_middle), (low % 2 == 0 ? low : high) | sign) << low;
}

TEST(LowPrecision, RoundsToTheNearestAndTiesToEven) {
  for (uint32_t low = 0; low < 0x7bffU; ++low) {
    expect_nearest(static_cast<uint16_t>(low), float16_bits, float_of_float16);
  }
  for (uint32_t low = 0x0080; low < 0x7f7fU; ++low) {
    expect_nearest(static_cast<uint16_t>(low), bfloat16_bits, float_of_bfloat16);
  }
}

// Sign, 4 bits of exponent, 3 of mantissa.
float float8_by_definition(uint16_t bits) {
  const int exponent = bits >> 3;
  const int mantissa = bits & 7;
  return static_cast<float>(exponent == 0 ? std::ldexp(mantissa, -9)
                                          : std::ldexp(mantissa + 8, exponent - 10));
}

TEST(LowPrecision, EightBitsAreTheNearestUpTo448) {
  for (uint16_t bits = 0; bits <= 0x7e; ++bits) {
    ASSERT_EQ(float8_bits(float8_by_definition(bits)), bits);
    ASSERT_EQ(float8_bits(-float8_by_definition(bits)), bits | 0x80);
    if (bits < 0x7e) {
      expect_nearest(bits, float8_bits, float8_by_definition, 0x80);
    }
  }
  EXPECT_EQ(float8_bits(1e-40F), 0);
  EXPECT_EQ(float8_bits(449.0F), 0x7e);
  EXPECT_EQ(float8_bits(-kInfinity), 0xfe);
  EXPECT_EQ(float8_bits(std::numeric_limits<float>::quiet_NaN()), 0x7f);
  EXPECT_EQ(float8_bits(-std::numeric_limits<float>::quiet_NaN()), 0x7f);
}

TEST(LowPrecision, TooLargeBecomesInfinity) {
  EXPECT_EQ(float16_bits(65519.0F), 0x7bff);
  EXPECT_EQ(float16_bits(65520.0F), 0x7c00);
  EXPECT_EQ(float16_bits(-1e30F), 0xfc00);
  EXPECT_EQ(float16_bits(kInfinity), 0x7c00);
  EXPECT_EQ(bfloat16_bits(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(bfloat16_bits(-kInfinity), 0xff80);
}

}  // namespace
}  // namespace megacore::base
