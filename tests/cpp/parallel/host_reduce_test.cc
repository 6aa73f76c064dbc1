#include "megacore/parallel/host_reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "megacore/base/low_precision.h"

namespace megacore::parallel {
namespace {

template <typename T>
std::vector<T> random_numbers(size_t numel, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<T> values(numel);
  for (T& value : values) {
    if constexpr (std::is_floating_point_v<T>) {
      value = std::normal_distribution<T>()(random);
    } else {
      value = static_cast<T>(random());
    }
  }
  return values;
}

template <typename T, typename Out = T>
std::vector<Out> reduced(const std::vector<std::vector<T>>& inputs,
                         HostDtype dtype,
                         HostReduction reduction,
                         HostDtype output_dtype) {
  std::vector<const std::byte*> parts;
  for (const std::vector<T>& input : inputs) {
    parts.push_back(reinterpret_cast<const std::byte*>(input.data()));
  }
  std::vector<Out> output(inputs[0].size());
  reduce_parts({.parts = parts,
                .numel = static_cast<int64_t>(output.size()),
                .dtype = dtype,
                .reduction = reduction,
                .output = reinterpret_cast<std::byte*>(output.data()),
                .output_dtype = output_dtype});
  return output;
}

TEST(HostReduce, AddsFloatsInTheOrderOfTheParts) {
  for (const unsigned num_parts : {1U, 2U, 3U, 5U}) {
    SCOPED_TRACE(num_parts);
    std::vector<std::vector<float>> inputs;
    for (unsigned p = 0; p < num_parts; ++p) {
      inputs.push_back(random_numbers<float>(5001, p));
    }
    const auto sum = reduced(inputs, HostDtype::kFloat32, HostReduction::kSum, HostDtype::kFloat32);
    const auto mean =
        reduced(inputs, HostDtype::kFloat32, HostReduction::kAvg, HostDtype::kFloat32);
    for (size_t i = 0; i < sum.size(); ++i) {
      float expected = inputs[0][i];
      for (unsigned p = 1; p < num_parts; ++p) {
        expected = expected + inputs[p][i];
      }
      ASSERT_EQ(sum[i], expected);
      ASSERT_EQ(mean[i], expected / static_cast<float>(num_parts));
    }
  }
}

TEST(HostReduce, RoundsLowPrecisionOnce) {
  // 256 + 1 + 1 + 1 = 259 lies between 258 and 260; rounding after each addition stays at 256.
  std::vector<std::vector<uint16_t>> inputs;
  for (const float value : {256.0F, 1.0F, 1.0F, 1.0F}) {
    inputs.push_back({base::bfloat16_bits(value)});
  }
  const auto narrow =
      reduced(inputs, HostDtype::kBFloat16, HostReduction::kSum, HostDtype::kBFloat16);
  EXPECT_EQ(base::float_of_bfloat16(narrow[0]), 260.0F);
  const auto wide = reduced<uint16_t, float>(inputs, HostDtype::kBFloat16, HostReduction::kAvg,
                                             HostDtype::kFloat32);
  EXPECT_EQ(wide[0], 259.0F / 4);
  const std::vector<std::vector<uint16_t>> halves(3, {base::float16_bits(0.1F)});
  const auto half = reduced(halves, HostDtype::kFloat16, HostReduction::kSum, HostDtype::kFloat16);
  const float tenth = base::float_of_float16(halves[0][0]);
  EXPECT_EQ(half[0], base::float16_bits(tenth + tenth + tenth));
}

TEST(HostReduce, FloatsMayBeWrittenInLowPrecision) {
  const std::vector<std::vector<float>> inputs = {{1.0F, -3.0F}, {0.0078125F, 1e-3F}};
  const auto output = reduced<float, uint16_t>(inputs, HostDtype::kFloat32, HostReduction::kSum,
                                               HostDtype::kBFloat16);
  EXPECT_EQ(output[0], base::bfloat16_bits(1.0078125F));
  EXPECT_EQ(output[1], base::bfloat16_bits(-3.0F + 1e-3F));
  EXPECT_FALSE(can_reduce(HostDtype::kFloat64, HostDtype::kFloat32));
  EXPECT_FALSE(can_reduce(HostDtype::kInt32, HostDtype::kFloat32));
}

TEST(HostReduce, KeepsNegativeZero) {
  const std::vector<std::vector<float>> inputs(2, {-0.0F});
  const auto sum = reduced(inputs, HostDtype::kFloat32, HostReduction::kSum, HostDtype::kFloat32);
  EXPECT_TRUE(std::signbit(sum[0]));
}

TEST(HostReduce, WholeNumbersWrapAround) {
  const std::vector<std::vector<int8_t>> small = {{100, -100}, {100, -100}, {1, -1}};
  EXPECT_EQ(reduced(small, HostDtype::kInt8, HostReduction::kSum, HostDtype::kInt8),
            (std::vector<int8_t>{-55, 55}));
  const int64_t top = std::numeric_limits<int64_t>::max();
  const std::vector<std::vector<int64_t>> large = {{top}, {1}};
  EXPECT_EQ(reduced(large, HostDtype::kInt64, HostReduction::kSum, HostDtype::kInt64),
            std::vector<int64_t>{std::numeric_limits<int64_t>::min()});
}

TEST(HostReduce, TakesTheMaximumAndLetsNanWin) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::vector<float>> inputs = {{nan, 1, 2, -5}, {0, nan, 3, -7}, {4, 0, 1, -6}};
  const auto result =
      reduced(inputs, HostDtype::kFloat32, HostReduction::kMax, HostDtype::kFloat32);
  EXPECT_TRUE(std::isnan(result[0]));
  EXPECT_TRUE(std::isnan(result[1]));
  EXPECT_EQ(result[2], 3.0F);
  EXPECT_EQ(result[3], -5.0F);
  const auto a = random_numbers<int32_t>(999, 1);
  const auto b = random_numbers<int32_t>(999, 2);
  const auto whole =
      reduced<int32_t>({a, b}, HostDtype::kInt32, HostReduction::kMax, HostDtype::kInt32);
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(whole[i], std::max(a[i], b[i]));
  }
}

TEST(HostReduce, AnyTrueIsTrue) {
  const std::vector<std::vector<uint8_t>> inputs = {{0, 1, 0, 1}, {0, 0, 1, 1}};
  for (const HostReduction reduction : {HostReduction::kSum, HostReduction::kMax}) {
    EXPECT_EQ(reduced(inputs, HostDtype::kBool, reduction, HostDtype::kBool),
              (std::vector<uint8_t>{0, 1, 1, 1}));
  }
}

TEST(HostReduce, CutsChangeNoBit) {
  constexpr size_t kNumel = 10007;
  std::vector<std::vector<uint16_t>> inputs;
  for (unsigned p = 0; p < 3; ++p) {
    inputs.emplace_back();
    for (const float value : random_numbers<float>(kNumel, p)) {
      inputs.back().push_back(base::bfloat16_bits(value));
    }
  }
  const auto whole =
      reduced(inputs, HostDtype::kBFloat16, HostReduction::kAvg, HostDtype::kBFloat16);
  for (const size_t cut : {1U, 63U, 4096U, 10006U}) {
    for (const auto& [start, end] : {std::pair<size_t, size_t>{0, cut}, {cut, kNumel}}) {
      std::vector<std::vector<uint16_t>> slices;
      for (const auto& input : inputs) {
        slices.emplace_back(input.begin() + static_cast<int64_t>(start),
                            input.begin() + static_cast<int64_t>(end));
      }
      const auto slice =
          reduced(slices, HostDtype::kBFloat16, HostReduction::kAvg, HostDtype::kBFloat16);
      ASSERT_TRUE(
          std::equal(slice.begin(), slice.end(), whole.begin() + static_cast<int64_t>(start)));
    }
  }
}

TEST(HostReduce, OutputMayBeOneOfTheParts) {
  const auto a = random_numbers<double>(5000, 1);
  const auto b = random_numbers<double>(5000, 2);
  for (const size_t over : {0U, 1U}) {
    std::vector<std::vector<double>> inputs = {a, b};
    const std::vector<const std::byte*> parts = {
        reinterpret_cast<const std::byte*>(inputs[0].data()),
        reinterpret_cast<const std::byte*>(inputs[1].data())};
    reduce_parts({.parts = parts,
                  .numel = 5000,
                  .dtype = HostDtype::kFloat64,
                  .output = reinterpret_cast<std::byte*>(inputs[over].data()),
                  .output_dtype = HostDtype::kFloat64});
    for (size_t i = 0; i < a.size(); ++i) {
      ASSERT_EQ(inputs[over][i], a[i] + b[i]);
    }
  }
}

TEST(HostReduce, RefusesWhatItCannotDo) {
  const std::byte* part = nullptr;
  EXPECT_THROW(reduce_parts({}), std::logic_error);
  EXPECT_THROW(reduce_parts({.parts = {&part, 1}, .output_dtype = HostDtype::kInt8}),
               std::logic_error);
}

}  // namespace
}  // namespace megacore::parallel
