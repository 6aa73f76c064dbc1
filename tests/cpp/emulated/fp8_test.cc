// The kernels that round to 8-bit floats, run on the CPU thread by thread: they give the bits of
// their twins, and write nothing else.

#include "megacore/cuda/fp8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "megacore/base/low_precision.h"
#include "megacore/moe/fp8.h"

namespace megacore {
namespace {

using cuda::FloatType;

template <typename Float>
constexpr FloatType kType = sizeof(Float) == 4 ? FloatType::kFloat32 : FloatType::kBfloat16;

// Begins at a multiple of 16 bytes, or one element behind.
template <typename Element>
class Memory {
 public:
  Memory(int64_t numel, bool is_aligned, int poison)
      : numel_(static_cast<size_t>(numel)), memory_(numel_ + 32 / sizeof(Element) + 1) {
    std::memset(static_cast<void*>(memory_.data()), poison, memory_.size() * sizeof(Element));
    void* start = memory_.data();
    size_t space = memory_.size() * sizeof(Element);
    data_ = static_cast<Element*>(std::align(16, 16, start, space)) + (is_aligned ? 0 : 1);
  }
  Element* data() { return data_; }
  Element& operator[](int64_t i) { return data_[i]; }
  bool operator==(const Memory& other) const {
    return std::memcmp(data_, other.data_, numel_ * sizeof(Element)) == 0;
  }

 private:
  size_t numel_;
  std::vector<Element> memory_;
  Element* data_ = nullptr;
};

// Numbers of many magnitudes, with zeros of both signs, subnormal numbers and exact halves of
// steps.
template <typename Float>
Memory<Float> awkward(int64_t numel, bool is_aligned, unsigned seed) {
  Memory<Float> x(numel, is_aligned, 0);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, 1.0F);
  std::uniform_int_distribution<int> kind(0, 11), power(-12, 12);
  for (int64_t i = 0; i < numel; ++i) {
    float value = normal(random) * std::exp2(static_cast<float>(power(random)));
    switch (kind(random)) {
      case 0:
        value = std::copysign(0.0F, value);
        break;
      case 1:
        value *= 1e-40F;
        break;
      case 2:
        value = std::round(value * 16.0F) / 16.0F;
        break;
      default:
        break;
    }
    if constexpr (sizeof(Float) == 4) {
      x[i] = value;
    } else {
      x[i] = base::bfloat16_bits(value);
    }
  }
  return x;
}

template <typename Float>
void spoil(Memory<Float>& x, int64_t at, float value) {
  if constexpr (sizeof(Float) == 4) {
    x[at] = value;
  } else {
    x[at] = base::bfloat16_bits(value);
  }
}

template <typename Float>
void check_rows(int64_t rows, int64_t width, bool is_aligned, const int64_t* used) {
  SCOPED_TRACE(testing::Message() << rows << " x " << width << (is_aligned ? "" : " not aligned"));
  auto x = awkward<Float>(rows * width, is_aligned, 1);
  spoil(x, width / 2, std::numeric_limits<float>::infinity());
  spoil(x, rows * width - 1, std::numeric_limits<float>::quiet_NaN());
  Memory<uint8_t> values(rows * width, is_aligned, 0xEE),
      expected = Memory<uint8_t>(rows * width, is_aligned, 0xEE);
  Memory<float> scales(rows * moe::scale_blocks(width), true, 0xEE);
  Memory<float> expected_scales(rows * moe::scale_blocks(width), true, 0xEE);
  cuda::quantize_rows({.type = kType<Float>,
                       .x = x.data(),
                       .values = values.data(),
                       .scales = scales.data(),
                       .num_rows = used,
                       .rows = rows,
                       .width = width},
                      nullptr);
  moe::quantize_rows(x.data(), expected.data(), expected_scales.data(), used, rows, width, 1);
  EXPECT_EQ(values, expected);
  EXPECT_EQ(scales, expected_scales);
}

template <typename Float>
void check_columns(const std::vector<int64_t>& counts,
                   int64_t tail,
                   int64_t width,
                   bool transposed) {
  int64_t rows = tail;
  for (const int64_t count : counts) {
    rows += count;
  }
  SCOPED_TRACE(testing::Message() << rows << " x " << width << (transposed ? " transposed" : ""));
  auto x = awkward<Float>(rows * width, true, 2);
  spoil(x, width / 2, std::numeric_limits<float>::quiet_NaN());
  const moe::ExpertRows shape = {.m_splits = counts.size() == 1 ? nullptr : counts.data(),
                                 .rows = rows,
                                 .num_experts = static_cast<int64_t>(counts.size()),
                                 .width = width};
  const int64_t blocks = moe::row_blocks(rows, shape.num_experts);
  const int64_t numel = (transposed ? blocks * moe::kScaleBlock : rows) * width;
  Memory<uint8_t> values(numel, true, 0xEE), expected(numel, true, 0xEE);
  Memory<float> scales(blocks * width, true, 0xEE), expected_scales(blocks * width, true, 0xEE);
  cuda::quantize_columns({.type = kType<Float>,
                          .x = x.data(),
                          .values = values.data(),
                          .scales = scales.data(),
                          .shape = shape,
                          .transposed = transposed},
                         nullptr);
  moe::quantize_columns(x.data(), expected.data(), expected_scales.data(), shape, transposed, 1);
  EXPECT_EQ(values, expected);
  EXPECT_EQ(scales, expected_scales);
}

template <typename Float>
void check_blocks(int64_t height, int64_t width, bool transposed) {
  SCOPED_TRACE(testing::Message() << height << " x " << width << (transposed ? " transposed" : ""));
  auto w = awkward<Float>(2 * height * width, true, 3);
  spoil(w, height * width, -std::numeric_limits<float>::infinity());
  const int64_t blocks = 2 * moe::scale_blocks(height) * moe::scale_blocks(width);
  Memory<uint8_t> values(2 * height * width, true, 0xEE), expected(2 * height * width, true, 0xEE);
  Memory<float> scales(blocks, true, 0xEE), expected_scales(blocks, true, 0xEE);
  cuda::quantize_blocks({.type = kType<Float>,
                         .x = w.data(),
                         .values = values.data(),
                         .scales = scales.data(),
                         .num = 2,
                         .height = height,
                         .width = width,
                         .transposed = transposed},
                        nullptr);
  moe::quantize_blocks(w.data(), expected.data(), expected_scales.data(), 2, height, width,
                       transposed, 1);
  EXPECT_EQ(values, expected);
  EXPECT_EQ(scales, expected_scales);
}

template <typename Float>
void check_all() {
  const int64_t used = 3, none = -1;
  check_rows<Float>(9, 1160, true, nullptr);
  check_rows<Float>(9, 200, true, &used);
  check_rows<Float>(9, 200, false, nullptr);
  check_rows<Float>(3, 131, true, nullptr);
  check_rows<Float>(3, 128, true, &none);
  for (const bool transposed : {false, true}) {
    check_columns<Float>({5, 0, 131}, 7, 72, transposed);
    check_columns<Float>({130, 1}, 0, 33, transposed);
    check_columns<Float>({140}, 0, 136, transposed);
    check_columns<Float>({0, 0}, 3, 16, transposed);
    check_blocks<Float>(130, 136, transposed);
    check_blocks<Float>(131, 33, transposed);
  }
}

TEST(Fp8, FloatsAreRoundedAsByTheTwin) { check_all<float>(); }
TEST(Fp8, Bfloat16IsRoundedAsByTheTwin) { check_all<uint16_t>(); }

TEST(Fp8, CountsThatDoNotFitStayWithinTheMatrices) {
  const std::vector<int64_t> counts = {-5, 100, int64_t{1} << 62};
  auto x = awkward<float>(140 * 16, true, 4);
  const moe::ExpertRows shape = {
      .m_splits = counts.data(), .rows = 140, .num_experts = 3, .width = 16};
  Memory<uint8_t> values(140 * 16, true, 0xEE), expected(140 * 16, true, 0xEE);
  Memory<float> scales(4 * 16, true, 0xEE), expected_scales(4 * 16, true, 0xEE);
  cuda::quantize_columns(
      {.x = x.data(), .values = values.data(), .scales = scales.data(), .shape = shape}, nullptr);
  moe::quantize_columns(x.data(), expected.data(), expected_scales.data(), shape, false, 1);
  EXPECT_EQ(values, expected);
  EXPECT_EQ(scales, expected_scales);
}

}  // namespace
}  // namespace megacore
