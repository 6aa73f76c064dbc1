#include "megacore/buffer/adamw.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

namespace megacore::buffer {
namespace {

struct State {
  std::vector<float> param, grad, exp_avg, exp_avg_sq;

  explicit State(size_t numel) {
    std::mt19937 random(static_cast<unsigned>(numel));
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < numel; ++i) {
      param.push_back(normal(random));
      grad.push_back(normal(random));
      exp_avg.push_back(normal(random));
      exp_avg_sq.push_back(std::fabs(normal(random)));
    }
  }

  AdamWTensors tensors(uint16_t* copy_out = nullptr, bool copy_is_float16 = false) {
    return {.param = param.data(),
            .grad = grad.data(),
            .exp_avg = exp_avg.data(),
            .exp_avg_sq = exp_avg_sq.data(),
            .copy_out = copy_out,
            .copy_is_float16 = copy_is_float16,
            .numel = static_cast<int64_t>(param.size())};
  }
};

constexpr AdamWOptions kOptions = {.lr = 1e-2,
                                   .beta1 = 0.9,
                                   .beta2 = 0.95,
                                   .eps = 1e-8,
                                   .weight_decay = 0.1,
                                   .bias_correction1 = 0.19,
                                   .bias_correction2 = 0.0975,
                                   .grad_scale = 0.5};

TEST(AdamW, FollowsTheFormulaInDoublePrecision) {
  State state(1000);
  const State before = state;
  adamw_step(state.tensors(), kOptions);
  for (size_t i = 0; i < before.param.size(); ++i) {
    const double g = 0.5 * double{before.grad[i]};
    const double m = 0.9 * double{before.exp_avg[i]} + 0.1 * g;
    const double v = 0.95 * double{before.exp_avg_sq[i]} + 0.05 * g * g;
    const double update = 1e-2 * (m / 0.19) / (std::sqrt(v / 0.0975) + 1e-8);
    ASSERT_NEAR(state.exp_avg[i], m, 1e-6);
    ASSERT_NEAR(state.exp_avg_sq[i], v, 1e-6);
    ASSERT_NEAR(state.param[i], double{before.param[i]} * (1.0 - 1e-3) - update, 1e-6);
  }
}

TEST(AdamW, GivesTheSameBitsForAnyCutOfTheRun) {
  State whole(1003);
  State parts(1003);
  adamw_step(whole.tensors(), kOptions);
  for (int64_t start = 0; start < 1003; start += 59) {
    const int64_t numel = std::min(int64_t{59}, 1003 - start);
    AdamWTensors t = parts.tensors();
    adamw_step({.param = t.param + start,
                .grad = t.grad + start,
                .exp_avg = t.exp_avg + start,
                .exp_avg_sq = t.exp_avg_sq + start,
                .numel = numel},
               kOptions);
  }
  EXPECT_EQ(whole.param, parts.param);
  EXPECT_EQ(whole.exp_avg, parts.exp_avg);
  EXPECT_EQ(whole.exp_avg_sq, parts.exp_avg_sq);
}

TEST(AdamW, GivesTheSameBitsForAnyNumberOfThreads) {
  State one(300'001);
  State many(300'001);
  adamw_step(one.tensors(), kOptions, 1);
  adamw_step(many.tensors(), kOptions, 4);
  EXPECT_EQ(one.param, many.param);
  EXPECT_EQ(one.exp_avg_sq, many.exp_avg_sq);
}

TEST(AdamW, LeavesZeroPaddingAtZero) {
  std::vector<float> zeros(4, 0.0F);
  std::vector<float> param = zeros;
  std::vector<float> grad = zeros;
  std::vector<float> exp_avg = zeros;
  std::vector<float> exp_avg_sq = zeros;
  adamw_step({.param = param.data(),
              .grad = grad.data(),
              .exp_avg = exp_avg.data(),
              .exp_avg_sq = exp_avg_sq.data(),
              .numel = 4},
             kOptions);
  EXPECT_EQ(param, zeros);
  EXPECT_EQ(exp_avg_sq, zeros);
}

TEST(AdamW, WritesTheNewParameterAsBfloat16) {
  State state(5000);
  std::vector<uint16_t> bits(5000);
  adamw_step(state.tensors(bits.data()), kOptions);
  for (size_t i = 0; i < bits.size(); ++i) {
    ASSERT_EQ(bits[i], base::bfloat16_bits(state.param[i]));
  }
}

TEST(AdamW, WritesTheNewParameterAsFloat16) {
  State state(5000);
  state.param[7] = 65521.0F;  // above the largest float16, also after the step
  std::vector<uint16_t> bits(5000);
  AdamWOptions options = kOptions;
  options.weight_decay = 0.0;
  options.lr = 1e-5;
  adamw_step(state.tensors(bits.data(), true), options);
  EXPECT_EQ(bits[7], 0x7c00);
  for (size_t i = 0; i < bits.size(); ++i) {
    ASSERT_EQ(bits[i], base::float16_bits(state.param[i]));
  }
}

TEST(AdamW, RoundsToTheNearestBfloat16TiesToEven) {
  EXPECT_EQ(base::bfloat16_bits(1.0F), 0x3f80);
  EXPECT_EQ(base::bfloat16_bits(-2.0F), 0xc000);
  EXPECT_EQ(base::bfloat16_bits(1.0F + 0x1p-8F), 0x3f80);             // half way: even below
  EXPECT_EQ(base::bfloat16_bits(1.0F + 3 * 0x1p-8F), 0x3f82);         // half way: even above
  EXPECT_EQ(base::bfloat16_bits(1.0F + 0x1p-8F + 0x1p-20F), 0x3f81);  // just above half way
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(base::bfloat16_bits(infinity), 0x7f80);
  EXPECT_EQ(base::bfloat16_bits(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(base::bfloat16_bits(std::numeric_limits<float>::quiet_NaN()), 0x7fc0);
}

TEST(AdamW, RejectsWhatCannotBeStepped) {
  State state(4);
  AdamWTensors no_grad = state.tensors();
  no_grad.grad = nullptr;
  EXPECT_THROW(adamw_step(no_grad, kOptions), std::invalid_argument);
  EXPECT_THROW(adamw_step(state.tensors(), kOptions, 0), std::invalid_argument);
  AdamWOptions options = kOptions;
  options.bias_correction2 = 0.0;
  EXPECT_THROW(adamw_step(state.tensors(), options), std::invalid_argument);
  options = kOptions;
  options.beta1 = 1.0;
  EXPECT_THROW(adamw_step(state.tensors(), options), std::invalid_argument);
  EXPECT_NO_THROW(adamw_step({}, kOptions));
}

TEST(SumOfSquares, IsExactForSmallIntegersOfAnyCount) {
  std::vector<float> values;
  for (int64_t n = 0; n < 200; ++n) {
    EXPECT_EQ(sum_of_squares(values.data(), n), static_cast<double>((n - 1) * n * (2 * n - 1) / 6));
    values.push_back(static_cast<float>(n));
  }
}

TEST(SumOfSquares, DoesNotOverflowBelowAnInfiniteElement) {
  std::vector<float> values(100, std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isfinite(sum_of_squares(values.data(), 100)));
  values[63] = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(std::isfinite(sum_of_squares(values.data(), 100)));
  values[63] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(std::isfinite(sum_of_squares(values.data(), 100)));
}

}  // namespace
}  // namespace megacore::buffer
