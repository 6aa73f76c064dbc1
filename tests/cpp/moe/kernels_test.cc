#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

#include "megacore/base/low_precision.h"
#include "megacore/moe/activations.h"
#include "megacore/moe/grouped_gemm.h"
#include "megacore/moe/permutation.h"

namespace megacore::moe {
namespace {

// Multiples of 1/8 with few bits: sums of their products are exact in fp32.
std::vector<float> eighths(int64_t numel, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<float> values(static_cast<size_t>(numel));
  for (float& value : values) {
    value = static_cast<float>(static_cast<int>(generator() % 17) - 8) / 8.0F;
  }
  return values;
}

struct Case {
  GroupedShape shape;
  std::vector<int64_t> m_splits;
};

std::vector<Case> cases() {
  return {
      {{.num_rows = 37, .num_experts = 3, .out_features = 45, .in_features = 70}, {18, 0, 12}},
      {{.num_rows = 9, .num_experts = 4, .out_features = 33, .in_features = 17}, {8, 0, 0, 1}},
      {{.num_rows = 300, .num_experts = 2, .out_features = 15, .in_features = 31}, {290, 9}},
      {{.num_rows = 20, .num_experts = 1, .out_features = 300, .in_features = 1030}, {20}},
      {{.num_rows = 230, .num_experts = 2, .out_features = 290, .in_features = 530}, {180, 49}},
      {{.num_rows = 1, .num_experts = 1, .out_features = 1, .in_features = 1}, {1}},
      {{.num_rows = 3, .num_experts = 2, .out_features = 4, .in_features = 5}, {0, 0}},
      {{.num_rows = 0, .num_experts = 0, .out_features = 4, .in_features = 5}, {}},
      {{.num_rows = 2, .num_experts = 1, .out_features = 4, .in_features = 0}, {2}},
      {{.num_rows = 2, .num_experts = 1, .out_features = 0, .in_features = 4}, {2}},
  };
}

// Factors and exact results of a case.
struct Products {
  std::vector<float> x, w, grad, y, grad_x, grad_w;

  explicit Products(const Case& c) {
    const auto& [rows, experts, n, k] = c.shape;
    x = eighths(rows * k, 1);
    w = eighths(experts * n * k, 2);
    grad = eighths(rows * n, 3);
    y.resize(grad.size());
    grad_x.resize(x.size());
    grad_w.resize(w.size());
    int64_t row = 0;
    for (int64_t e = 0; e < experts; ++e) {
      for (int64_t end = row + c.m_splits[static_cast<size_t>(e)]; row < end; ++row) {
        for (int64_t i = 0; i < n; ++i) {
          for (int64_t j = 0; j < k; ++j) {
            const auto at = static_cast<size_t>((e * n + i) * k + j);
            const auto in = static_cast<size_t>(row * k + j);
            const auto out = static_cast<size_t>(row * n + i);
            y[out] += x[in] * w[at];
            grad_x[in] += grad[out] * w[at];
            grad_w[at] += grad[out] * x[in];
          }
        }
      }
    }
  }
};

template <typename Type>
std::vector<uint16_t> rounded(const std::vector<float>& values) {
  std::vector<uint16_t> bits(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    bits[i] = Type::narrow(values[i]);
  }
  return bits;
}

// Sums are exact, so a narrow result is that of one rounding.
template <typename Type>
void expect_one_rounding(NumberFormat format) {
  for (const Case& c : cases()) {
    const auto& [rows, experts, n, k] = c.shape;
    SCOPED_TRACE(::testing::Message() << rows << " rows, N " << n << ", K " << k);
    const Products p(c);
    const auto x = rounded<Type>(p.x), w = rounded<Type>(p.w), grad = rounded<Type>(p.grad);
    for (const int threads : {1, 3}) {
      std::vector<uint16_t> y(grad.size(), 9);
      grouped_gemm({x.data(), format}, {w.data(), format}, c.m_splits.data(), {y.data(), format},
                   c.shape, true, threads);
      EXPECT_EQ(y, rounded<Type>(p.y));
      std::vector<uint16_t> grad_x(x.size(), 9);
      grouped_gemm_input_grad({grad.data(), format}, {w.data(), format}, c.m_splits.data(),
                              {grad_x.data(), format}, c.shape, true, threads);
      EXPECT_EQ(grad_x, rounded<Type>(p.grad_x));
      std::vector<uint16_t> grad_w(w.size(), 9);
      grouped_gemm_weight_grad({grad.data(), format}, {x.data(), format}, c.m_splits.data(),
                               {grad_w.data(), format}, c.shape, false, threads);
      EXPECT_EQ(grad_w, rounded<Type>(p.grad_w));
      std::vector<float> added = p.grad_w;
      grouped_gemm_weight_grad({grad.data(), format}, {x.data(), format}, c.m_splits.data(),
                               added.data(), c.shape, true, threads);
      for (size_t i = 0; i < added.size(); ++i) {
        EXPECT_EQ(added[i], 2.0F * p.grad_w[i]);
      }
    }
  }
}

TEST(GroupedGemm, RoundsSumsOfBFloat16Once) {
  expect_one_rounding<base::BFloat16>(NumberFormat::kBFloat16);
}

TEST(GroupedGemm, RoundsSumsOfFloat16Once) {
  expect_one_rounding<base::Float16>(NumberFormat::kFloat16);
}

TEST(GroupedGemm, AddsToGradientsInFloat32Only) {
  const GroupedShape shape{.num_rows = 1, .num_experts = 1, .out_features = 1, .in_features = 1};
  const int64_t split = 1;
  uint16_t memory = 0;
  const NumberFormat format = NumberFormat::kBFloat16;
  EXPECT_THROW(grouped_gemm_weight_grad({&memory, format}, {&memory, format}, &split,
                                        {&memory, format}, shape, true, 1),
               std::invalid_argument);
}

TEST(GroupedGemm, EqualsLoopsToTheBit) {
  for (const Case& c : cases()) {
    const auto& [rows, experts, n, k] = c.shape;
    SCOPED_TRACE(::testing::Message() << rows << " rows, N " << n << ", K " << k);
    const auto [x, w, grad, y_expected, grad_x_expected, grad_w_expected] = Products(c);
    for (const int threads : {1, 3}) {
      std::vector<float> y(grad.size(), 9.0F);
      grouped_gemm(x.data(), w.data(), c.m_splits.data(), y.data(), c.shape, true, threads);
      EXPECT_EQ(y, y_expected);
      std::vector<float> grad_x(x.size(), 9.0F);
      grouped_gemm_input_grad(grad.data(), w.data(), c.m_splits.data(), grad_x.data(), c.shape,
                              true, threads);
      EXPECT_EQ(grad_x, grad_x_expected);
      std::vector<float> grad_w(w.size(), 9.0F);
      grouped_gemm_weight_grad(grad.data(), x.data(), c.m_splits.data(), grad_w.data(), c.shape,
                               false, threads);
      EXPECT_EQ(grad_w, grad_w_expected);
      grouped_gemm_weight_grad(grad.data(), x.data(), c.m_splits.data(), grad_w.data(), c.shape,
                               true, threads);
      for (size_t i = 0; i < grad_w.size(); ++i) {
        EXPECT_EQ(grad_w[i], 2.0F * grad_w_expected[i]);
      }
    }
  }
}

TEST(GroupedGemm, RefusesSplitsThatDoNotFit) {
  const GroupedShape shape{.num_rows = 3, .num_experts = 2, .out_features = 1, .in_features = 1};
  std::vector<float> memory(8);
  for (const std::vector<int64_t>& splits :
       {std::vector<int64_t>{2, 2}, {-1, 1}, {INT64_MAX, INT64_MAX}}) {
    EXPECT_THROW(
        grouped_gemm(memory.data(), memory.data(), splits.data(), memory.data(), shape, true, 1),
        std::invalid_argument);
  }
}

TEST(Permutation, SortsByExpertThenTokenThenChoice) {
  const std::vector<int64_t> expert_of = {1, 0, 0, -1, 1, 1};
  std::vector<int64_t> row_map(6);
  std::vector<int64_t> counts(3, 9);
  sort_by_expert(expert_of.data(), 6, 3, row_map.data(), counts.data());
  EXPECT_EQ(row_map, (std::vector<int64_t>{2, 0, 1, -1, 3, 4}));
  EXPECT_EQ(counts, (std::vector<int64_t>{2, 3, 0}));
  EXPECT_THROW(sort_by_expert(expert_of.data(), 6, 1, row_map.data(), counts.data()),
               std::invalid_argument);
}

TEST(Permutation, PermuteAndUnpermuteFollowTheMap) {
  const std::vector<int64_t> rows = {2, 0, 3, -1};
  const RowMap map{.rows = rows.data(), .num_tokens = 2, .num_choices = 2, .num_rows = 5};
  const auto tokens = eighths(2 * 19, 4);
  const std::vector<float> weights = {0.5F, 2.0F, 0.25F, 7.0F};
  for (const int threads : {1, 3}) {
    std::vector<float> spread(5 * 19, 9.0F);
    permute(tokens.data(), weights.data(), spread.data(), map, 19, threads);
    std::vector<float> collected(tokens.size(), 9.0F);
    const float* ones = nullptr;
    unpermute(spread.data(), ones, collected.data(), map, 19, threads);
    std::vector<float> dots(4, 9.0F);
    row_dots(tokens.data(), spread.data(), dots.data(), map, 19, threads);
    float square = 0.0F;
    for (size_t i = 0; i < 19; ++i) {
      EXPECT_EQ(spread[i], 2.0F * tokens[i]);
      EXPECT_EQ(spread[19 + i], 0.0F);
      EXPECT_EQ(spread[38 + i], 0.5F * tokens[i]);
      EXPECT_EQ(spread[57 + i], 0.25F * tokens[19 + i]);
      EXPECT_EQ(spread[76 + i], 0.0F);
      EXPECT_EQ(collected[i], 2.5F * tokens[i]);
      EXPECT_EQ(collected[19 + i], 0.25F * tokens[19 + i]);
      square += tokens[i] * tokens[i];
    }
    EXPECT_EQ(dots[0], 0.5F * square);
    EXPECT_EQ(dots[1], 2.0F * square);
    EXPECT_EQ(dots[3], 0.0F);
  }
  const RowMap narrow{.rows = rows.data(), .num_tokens = 2, .num_choices = 2, .num_rows = 3};
  std::vector<float> spread(3 * 19);
  EXPECT_THROW(permute(tokens.data(), weights.data(), spread.data(), narrow, 19, 1),
               std::invalid_argument);
}

TEST(TopK, LowerColumnsWinTiesAndNaNWinsAll) {
  const std::vector<float> scores = {1.0F, 3.0F, 3.0F, -2.0F, -0.0F, 0.0F, NAN, INFINITY};
  std::vector<int64_t> chosen(8);
  top_k(scores.data(), 1, 8, 8, chosen.data(), 1);
  EXPECT_EQ(chosen, (std::vector<int64_t>{6, 7, 1, 2, 0, 4, 5, 3}));
  EXPECT_THROW(top_k(scores.data(), 1, 8, 9, chosen.data(), 1), std::invalid_argument);
}

TEST(Activations, EqualFloat64) {
  const ActivationShape shape{.rows = 3, .width = 300};
  for (const Activation kind : {Activation::kSwiglu, Activation::kGelu}) {
    const int64_t stride = kind == Activation::kSwiglu ? 600 : 300;
    auto x = eighths(3 * stride, 5);
    for (float& value : x) {
      value *= 12.0F;
    }
    const std::vector<float> probs = {0.5F, 1.0F, 0.0F};
    std::vector<float> y(900);
    activate(kind, x.data(), probs.data(), y.data(), shape, 2);
    for (int64_t row = 0; row < 3; ++row) {
      for (int64_t i = 0; i < 300; ++i) {
        const double a = x[static_cast<size_t>(row * stride + i)];
        double expected = 0.0;
        if (kind == Activation::kSwiglu) {
          expected = a / (1.0 + std::exp(-a)) * x[static_cast<size_t>(row * stride + 300 + i)];
        } else {
          const double u = std::sqrt(2.0 / M_PI) * (a + 0.044715 * a * a * a);
          expected = 0.5 * a * (1.0 + std::tanh(u));
        }
        expected *= probs[static_cast<size_t>(row)];
        EXPECT_NEAR(y[static_cast<size_t>(row * 300 + i)], expected,
                    2e-7 * (1 + std::abs(expected)));
      }
    }
  }
}

}  // namespace
}  // namespace megacore::moe
