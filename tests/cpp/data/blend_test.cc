#include "megacore/data/blend.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace megacore::data {
namespace {

TEST(BlendOrder, TakesFromTheDatasetThatIsFurthestBehindAcrossCalls) {
  std::vector<double> weights(37);
  for (size_t i = 0; i < weights.size(); ++i) {
    weights[i] = static_cast<double>(i % 5 + 1) / 110.0;
  }
  BlendOrder order(weights);
  std::vector<int64_t> counts(weights.size(), 0);
  int64_t sample = 0;
  for (const size_t size : {size_t{1}, size_t{0}, size_t{100}, size_t{1000}}) {
    std::vector<int16_t> datasets(size);
    std::vector<int64_t> numbers(size);
    order.take(datasets, numbers);
    for (size_t i = 0; i < size; ++i, ++sample) {
      const double at = sample == 0 ? 1.0 : static_cast<double>(sample);
      size_t expected = 0;
      double most = -INFINITY;
      for (size_t d = 0; d < weights.size(); ++d) {
        const double behind = weights[d] * at - static_cast<double>(counts[d]);
        if (behind > most) {
          most = behind;
          expected = d;
        }
      }
      ASSERT_EQ(datasets[i], static_cast<int16_t>(expected));
      ASSERT_EQ(numbers[i], counts[expected]++);
    }
  }
  for (size_t d = 0; d < weights.size(); ++d) {
    EXPECT_EQ(order.count(d), counts[d]);
  }
}

TEST(BlendOrder, RefusesNoAndInfiniteWeights) {
  EXPECT_THROW(BlendOrder(std::vector<double>{}), std::invalid_argument);
  EXPECT_THROW(BlendOrder(std::vector<double>{0.5, INFINITY}), std::invalid_argument);
}

}  // namespace
}  // namespace megacore::data
