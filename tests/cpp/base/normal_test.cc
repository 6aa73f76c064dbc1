#include "megacore/base/normal.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace megacore::base {
namespace {

std::vector<float> drawn(const NormalStretches& stretches, int num_threads = 1) {
  std::vector<float> out(static_cast<size_t>(stretches.count * stretches.length));
  fill_normal(out.data(), stretches, 5, 2.0F, num_threads);
  return out;
}

TEST(Normal, ANumberDependsOnItsIndexAlone) {
  const std::vector<float> whole = drawn({.count = 1, .length = 3000, .first = 0, .stride = 0});
  for (const int64_t first : {0, 1, 511, 512, 1023}) {
    for (const int64_t length : {1, 2, 511, 512, 513}) {
      const NormalStretches stretches = {.count = 3, .length = length, .first = first, .stride = 7};
      const std::vector<float> numbers = drawn(stretches, 2);
      for (int64_t i = 0; i < 3 * length; ++i) {
        const int64_t index = first + i / length * 7 + i % length;
        EXPECT_EQ(numbers[static_cast<size_t>(i)], whole[static_cast<size_t>(index)]);
      }
    }
  }
}

TEST(Normal, ThreadsShareLongStretches) {
  const NormalStretches stretches = {.count = 2, .length = 200'001, .first = 3, .stride = 200'001};
  EXPECT_EQ(drawn(stretches, 1), drawn(stretches, 3));
}

TEST(Normal, EveryNumberIsFinite) {
  for (const float number : drawn({.count = 1, .length = 1 << 20, .first = 0, .stride = 0})) {
    ASSERT_TRUE(std::isfinite(number));
    ASSERT_LE(std::abs(number), 2.0F * 5.78F);
  }
}

TEST(Normal, NegativeSizesAreRefused) {
  EXPECT_THROW(drawn({.count = 0, .length = -1, .first = 0, .stride = 0}), std::invalid_argument);
}

}  // namespace
}  // namespace megacore::base
