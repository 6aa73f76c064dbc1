#include "megacore/base/check.h"

#include <gtest/gtest.h>

#include <limits>

#include "megacore/base/intmath.h"

namespace megacore::base {
namespace {

TEST(Check, RequireCarriesTheValues) {
  try {
    MC_REQUIRE(1 == 2, "tp is {}; it must divide {}", 3, 8);
    FAIL() << "expected an exception";
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "tp is 3; it must divide 8");
  }
}

TEST(Check, InvariantIsALogicErrorThatIsNotAnInvalidArgument) {
  EXPECT_THROW(
      {
        try {
          MC_INVARIANT(false, "x");
        } catch (const std::invalid_argument&) {
          FAIL() << "our own bug must not look like a caller's mistake";
        }
      },
      std::logic_error);
}

TEST(IntMath, CheckedMulRefusesOverflow) {
  EXPECT_EQ(checked_mul(1'000'000, 1'000'000), 1'000'000'000'000);
  EXPECT_THROW(checked_mul(std::numeric_limits<int64_t>::max(), 2), std::invalid_argument);
}

TEST(IntMath, CeilDivAndAlignUpAreExactAtTheBorders) {
  EXPECT_EQ(ceil_div(0, 7), 0);
  EXPECT_EQ(ceil_div(7, 7), 1);
  EXPECT_EQ(ceil_div(8, 7), 2);
  EXPECT_EQ(align_up(0, 64), 0);
  EXPECT_EQ(align_up(64, 64), 64);
  EXPECT_EQ(align_up(65, 64), 128);
}

}  // namespace
}  // namespace megacore::base
