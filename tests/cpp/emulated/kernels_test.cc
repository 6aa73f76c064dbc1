// The kernels on tokens, run on the CPU thread by thread, against their twins.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <tuple>
#include <vector>

#include "megacore/base/low_precision.h"
#include "megacore/buffer/adamw.h"
#include "megacore/cuda/activations.h"
#include "megacore/cuda/optim.h"
#include "megacore/cuda/permutation.h"
#include "megacore/cuda/sum_of_squares.h"
#include "megacore/cuda/topk.h"
#include "megacore/moe/activations.h"
#include "megacore/moe/permutation.h"

namespace megacore {
namespace {

using cuda::FloatType;

template <typename Float>
Float narrowed(float value) {
  if constexpr (std::is_same_v<Float, float>) {
    return value;
  } else {
    return base::bfloat16_bits(value);
  }
}

float widened(float value) { return value; }
float widened(uint16_t bits) { return base::float_of_bfloat16(bits); }

template <typename Float>
constexpr FloatType kTypeOf =
    std::is_same_v<Float, float> ? FloatType::kFloat32 : FloatType::kBfloat16;

template <typename Float>
std::vector<Float> normal(int64_t numel, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution;
  std::vector<Float> values(static_cast<size_t>(numel));
  std::generate(values.begin(), values.end(),
                [&] { return narrowed<Float>(distribution(random)); });
  return values;
}

template <typename Float>
std::vector<Float> poison(int64_t numel) {
  return {static_cast<size_t>(numel), narrowed<Float>(std::numeric_limits<float>::quiet_NaN()),
          std::allocator<Float>()};
}

template <typename Float>
void expect_near(const std::vector<Float>& found, const std::vector<Float>& expected, float part) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    const float a = widened(found[i]), b = widened(expected[i]);
    ASSERT_LE(std::fabs(a - b), part * (1.0F + std::fabs(b))) << "at " << i;
  }
}

// Experts of copies, some of them missing (-1).
std::vector<int64_t> experts(int64_t numel, int64_t num_experts, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int64_t> any(-1, num_experts - 1);
  std::vector<int64_t> chosen(static_cast<size_t>(numel));
  std::generate(chosen.begin(), chosen.end(), [&] { return any(random); });
  return chosen;
}

class Sort : public testing::TestWithParam<std::tuple<int64_t, int64_t>> {};

TEST_P(Sort, HasTheRowsOfTheCpu) {
  const auto [numel, num_experts] = GetParam();
  const std::vector<int64_t> chosen = experts(numel, num_experts, 1);
  std::vector<int64_t> rows(chosen.size(), 99), expected_rows = rows;
  std::vector<int64_t> counts(static_cast<size_t>(num_experts), 99), expected_counts = counts;
  std::vector<int32_t> workspace(
      static_cast<size_t>(cuda::sort_workspace_numel(numel, num_experts)), 99);
  cuda::sort_by_expert({.expert_of = chosen.data(),
                        .numel = numel,
                        .num_experts = num_experts,
                        .row_map = rows.data(),
                        .tokens_per_expert = counts.data(),
                        .workspace = workspace.data()},
                       nullptr);
  moe::sort_by_expert(chosen.data(), numel, num_experts, expected_rows.data(),
                      expected_counts.data());
  EXPECT_EQ(rows, expected_rows);
  EXPECT_EQ(counts, expected_counts);
}

// The last ones have stretches of several turns of a warp: copies of two tiles at most, see the
// build.
INSTANTIATE_TEST_SUITE_P(Sizes,
                         Sort,
                         testing::Values(std::tuple{0, 3},
                                         std::tuple{1, 1},
                                         std::tuple{700, 5},
                                         std::tuple{513, 512},
                                         std::tuple{1025, 33},
                                         std::tuple{5003, 60}));

TEST(Sort, LeavesOutExpertsThatDoNotExist) {
  const std::vector<int64_t> chosen = {0, 7, -5, 1, int64_t{1} << 40, 0};
  std::vector<int64_t> rows(6), counts(2);
  std::vector<int32_t> workspace(static_cast<size_t>(cuda::sort_workspace_numel(6, 2)));
  cuda::sort_by_expert({.expert_of = chosen.data(),
                        .numel = 6,
                        .num_experts = 2,
                        .row_map = rows.data(),
                        .tokens_per_expert = counts.data(),
                        .workspace = workspace.data()},
                       nullptr);
  EXPECT_EQ(rows, (std::vector<int64_t>{0, -1, -1, 2, -1, 1}));
  EXPECT_EQ(counts, (std::vector<int64_t>{2, 1}));
}

struct RowCase {
  int64_t tokens;
  int64_t choices;
  int64_t width;
  bool weighted;
  int64_t skew = 0;  // elements before the first: no 16-byte boundary
};

template <typename Float>
void check_rows(const RowCase& c) {
  const int64_t copies = c.tokens * c.choices, num_rows = copies + 3, skew = c.skew;
  std::vector<int64_t> map(static_cast<size_t>(copies));
  std::iota(map.begin(), map.end(), 0);
  std::shuffle(map.begin(), map.end(), std::mt19937(3));
  for (size_t i = 0; i < map.size(); i += 4) {
    map[i] = -1;
  }
  const std::vector<Float> tokens = normal<Float>(c.tokens * c.width + skew, 4);
  const std::vector<Float> source = normal<Float>(num_rows * c.width + skew, 5);
  const std::vector<float> factors = normal<float>(copies, 6);
  const float* weights = c.weighted ? factors.data() : nullptr;
  const cuda::RowMap on_device{map.data(), c.tokens, c.choices, num_rows, c.width};
  const moe::RowMap on_host{map.data(), c.tokens, c.choices, num_rows};

  std::vector<Float> rows = poison<Float>(num_rows * c.width + skew), expected = rows;
  std::vector<uint8_t> is_written(static_cast<size_t>(num_rows), 7);
  cuda::permute({.tokens = tokens.data() + skew,
                 .weights = weights,
                 .rows = rows.data() + skew,
                 .is_written = is_written.data(),
                 .map = on_device,
                 .type = kTypeOf<Float>},
                nullptr);
  moe::permute(tokens.data() + skew, weights, expected.data() + skew, on_host, c.width, 1);
  const auto bits_from = [&](std::vector<Float>& all) {
    return std::vector<Float>(all.begin() + skew, all.end());
  };
  EXPECT_EQ(bits_from(rows), bits_from(expected));

  std::vector<Float> sums = poison<Float>(c.tokens * c.width + skew), expected_sums = sums;
  cuda::unpermute({.rows = source.data() + skew,
                   .weights = weights,
                   .tokens = sums.data() + skew,
                   .map = on_device,
                   .type = kTypeOf<Float>},
                  nullptr);
  moe::unpermute(source.data() + skew, weights, expected_sums.data() + skew, on_host, c.width, 1);
  expect_near(bits_from(sums), bits_from(expected_sums),
              kTypeOf<Float> == FloatType::kFloat32 ? 1e-6F : 8e-3F);

  std::vector<float> dots = poison<float>(copies), expected_dots = dots;
  cuda::row_dots({.tokens = tokens.data() + skew,
                  .rows = source.data() + skew,
                  .dots = dots.data(),
                  .map = on_device,
                  .type = kTypeOf<Float>},
                 nullptr);
  moe::row_dots(tokens.data() + skew, source.data() + skew, expected_dots.data(), on_host, c.width,
                1);
  expect_near(dots, expected_dots, 1e-4F);
}

TEST(Rows, MoveAndAddUpAsOnTheCpu) {
  for (const RowCase& c :
       {RowCase{.tokens = 9, .choices = 3, .width = 5, .weighted = true},
        RowCase{.tokens = 11, .choices = 5, .width = 64, .weighted = false},
        RowCase{.tokens = 3, .choices = 2, .width = 1088, .weighted = true},
        RowCase{.tokens = 2, .choices = 9, .width = 4104, .weighted = true},
        RowCase{.tokens = 5, .choices = 2, .width = 72, .weighted = true, .skew = 1}}) {
    SCOPED_TRACE(c.width);
    check_rows<float>(c);
    check_rows<uint16_t>(c);
  }
}

TEST(TopK, ChoosesAsTheCpuDoes) {
  for (const auto& [rows, columns, k] :
       {std::tuple{3, 1, 1}, std::tuple{9, 8, 2}, std::tuple{5, 33, 33}, std::tuple{4, 256, 8},
        std::tuple{2, 1024, 5}}) {
    std::mt19937 random(static_cast<unsigned>(columns));
    std::uniform_int_distribution<int> few(-3, 4);  // many are equal
    std::vector<float> scores(static_cast<size_t>(rows * columns));
    std::generate(scores.begin(), scores.end(), [&] {
      const int value = few(random);
      return value == 4   ? std::numeric_limits<float>::quiet_NaN()
             : value == 0 ? -0.0F
                          : static_cast<float>(value);
    });
    std::vector<int64_t> chosen(static_cast<size_t>(rows * k), -1), expected = chosen;
    cuda::top_k({.scores = scores.data(),
                 .rows = rows,
                 .columns = columns,
                 .k = k,
                 .chosen = chosen.data()},
                nullptr);
    moe::top_k(scores.data(), rows, columns, k, expected.data(), 1);
    EXPECT_EQ(chosen, expected) << columns;
  }
}

template <typename Float>
void check_activation(moe::Activation kind, int64_t rows, int64_t width) {
  const int64_t inner = kind == moe::Activation::kSwiglu ? 2 * width : width;
  const float part = kTypeOf<Float> == FloatType::kFloat32 ? 1e-5F : 8e-3F;
  const std::vector<Float> x = normal<Float>(rows * inner, 7),
                           grad = normal<Float>(rows * width, 8);
  const std::vector<float> probs = normal<float>(rows, 9);
  std::vector<Float> y = poison<Float>(rows * width), expected_y = y;
  cuda::activate({.kind = kind,
                  .type = kTypeOf<Float>,
                  .x = x.data(),
                  .probs = probs.data(),
                  .y = y.data(),
                  .rows = rows,
                  .width = width},
                 nullptr);
  moe::activate(kind, x.data(), probs.data(), expected_y.data(), {rows, width}, 1);
  expect_near(y, expected_y, part);

  std::vector<Float> grad_x = poison<Float>(rows * inner), expected_x = grad_x;
  std::vector<float> grad_probs = poison<float>(rows), expected_probs = grad_probs;
  cuda::activate_backward({.kind = kind,
                           .type = kTypeOf<Float>,
                           .grad_y = grad.data(),
                           .x = x.data(),
                           .probs = probs.data(),
                           .grad_x = grad_x.data(),
                           .grad_probs = grad_probs.data(),
                           .rows = rows,
                           .width = width},
                          nullptr);
  moe::activate_backward(kind, grad.data(), x.data(), probs.data(), expected_x.data(),
                         expected_probs.data(), {rows, width}, 1);
  expect_near(grad_x, expected_x, part);
  expect_near(grad_probs, expected_probs, 1e-4F);
}

// Of `rows` rows `used` are in use: both leave the others alone.
void check_unused_rows(moe::Activation kind, int64_t rows, int64_t used, int64_t width) {
  const int64_t inner = kind == moe::Activation::kSwiglu ? 2 * width : width;
  const std::vector<float> x = normal<float>(rows * inner, 7),
                           grad = normal<float>(rows * width, 8), probs = normal<float>(rows, 9);
  const auto is_untouched = [](const std::vector<float>& values, int64_t from) {
    return std::all_of(values.begin() + from, values.end(),
                       [](float value) { return std::isnan(value); });
  };
  std::vector<float> y = poison<float>(rows * width), expected_y = y;
  cuda::activate({.kind = kind,
                  .type = FloatType::kFloat32,
                  .x = x.data(),
                  .probs = probs.data(),
                  .y = y.data(),
                  .num_rows = &used,
                  .rows = rows,
                  .width = width},
                 nullptr);
  moe::activate(kind, x.data(), probs.data(), expected_y.data(), {rows, width, &used}, 1);
  const int64_t end = std::clamp(used, int64_t{0}, rows);
  std::vector<float> grad_x = poison<float>(rows * inner), expected_x = grad_x;
  std::vector<float> grad_probs = poison<float>(rows), expected_probs = grad_probs;
  cuda::activate_backward({.kind = kind,
                           .type = FloatType::kFloat32,
                           .grad_y = grad.data(),
                           .x = x.data(),
                           .probs = probs.data(),
                           .grad_x = grad_x.data(),
                           .grad_probs = grad_probs.data(),
                           .num_rows = &used,
                           .rows = rows,
                           .width = width},
                          nullptr);
  moe::activate_backward(kind, grad.data(), x.data(), probs.data(), expected_x.data(),
                         expected_probs.data(), {rows, width, &used}, 1);
  for (auto* values : {&y, &expected_y}) {
    EXPECT_TRUE(is_untouched(*values, end * width));
    values->resize(static_cast<size_t>(end * width));
  }
  for (auto* values : {&grad_x, &expected_x}) {
    EXPECT_TRUE(is_untouched(*values, end * inner));
    values->resize(static_cast<size_t>(end * inner));
  }
  for (auto* values : {&grad_probs, &expected_probs}) {
    EXPECT_TRUE(is_untouched(*values, end));
    values->resize(static_cast<size_t>(end));
  }
  expect_near(y, expected_y, 1e-5F);
  expect_near(grad_x, expected_x, 1e-5F);
  expect_near(grad_probs, expected_probs, 1e-4F);
}

TEST(Activations, LeaveRowsOfNobodyAlone) {
  for (const auto kind : {moe::Activation::kSwiglu, moe::Activation::kGelu}) {
    for (const int64_t used : {-1, 0, 3, 9, 100}) {
      check_unused_rows(kind, 9, used, 40);
    }
    check_unused_rows(kind, 4, 2, 2056);
  }
}

TEST(Activations, AndTheirGradientsAgreeWithTheCpu) {
  for (const auto kind : {moe::Activation::kSwiglu, moe::Activation::kGelu}) {
    for (const auto& [rows, width] : {std::pair{9, 5}, std::pair{3, 96}, std::pair{2, 2056}}) {
      check_activation<float>(kind, rows, width);
      check_activation<uint16_t>(kind, rows, width);
    }
  }
}

TEST(AdamW, HasTheBitsOfTheCpu) {
  for (const auto& [numel, skew, is_float16] :
       {std::tuple{int64_t{3}, size_t{0}, true}, std::tuple{int64_t{1030}, size_t{0}, false},
        std::tuple{int64_t{1030}, size_t{0}, true}, std::tuple{int64_t{301}, size_t{1}, true}}) {
    const auto size = static_cast<int64_t>(skew) + numel;
    std::vector<float> state[2][3];
    std::vector<uint16_t> copies[2];
    const std::vector<float> grad = normal<float>(size, 11);
    for (size_t i = 0; i < 2; ++i) {
      state[i][0] = normal<float>(size, 12);
      state[i][1] = normal<float>(size, 13);
      state[i][2] = normal<float>(size, 14);
      std::for_each(state[i][2].begin(), state[i][2].end(), [](float& v) { v = std::fabs(v); });
      state[i][0][skew + 1] = 1e6F;  // no float16
      copies[i].assign(static_cast<size_t>(size), 7);
    }
    const buffer::AdamWOptions options = {.lr = 1e-2, .weight_decay = 0.1, .grad_scale = 0.5};
    cuda::adamw_step({.param = state[0][0].data() + skew,
                      .grad = grad.data() + skew,
                      .exp_avg = state[0][1].data() + skew,
                      .exp_avg_sq = state[0][2].data() + skew,
                      .copy_out = copies[0].data() + skew,
                      .copy_is_float16 = is_float16,
                      .numel = numel,
                      .options = options},
                     nullptr);
    buffer::adamw_step({.param = state[1][0].data() + skew,
                        .grad = grad.data() + skew,
                        .exp_avg = state[1][1].data() + skew,
                        .exp_avg_sq = state[1][2].data() + skew,
                        .copy_out = copies[1].data() + skew,
                        .copy_is_float16 = is_float16,
                        .numel = numel},
                       options);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(state[0][i], state[1][i]) << i;
    }
    EXPECT_EQ(copies[0], copies[1]);
  }
}

TEST(AdamW, IsCalledOffByADecision) {
  std::vector<float> values[4];
  std::fill(values, values + 4, std::vector<float>(10, 1.0F));
  buffer::StepState state = {
      .step_count = 5.0, .num_skipped = 0.0, .loss_scale = 8.0, .good_steps = 1.0};
  const buffer::StepSums sums = {.squared_norm = 1.0, .num_nonfinite = 1.0, .num_tokens = 0.0};
  buffer::StepControl control = {};
  control.lr = 1.0;
  cuda::decide_step(&state, &sums, &control, {}, nullptr);
  cuda::adamw_step({.param = values[0].data(),
                    .grad = values[1].data(),
                    .exp_avg = values[2].data(),
                    .exp_avg_sq = values[3].data(),
                    .numel = 10,
                    .options = {.lr = 0.1},
                    .control = &control},
                   nullptr);
  EXPECT_EQ(state.num_skipped, 1.0);
  EXPECT_EQ(values[0], std::vector<float>(10, 1.0F));
}

TEST(SumOfSquares, IsTheSumOfAllInTheSameOrderWhereverTheyLie) {
  for (const int64_t numel : {int64_t{0}, int64_t{3}, int64_t{1029}, int64_t{20'007}}) {
    const std::vector<float> values = normal<float>(numel, 10);
    std::vector<float> moved(values.size() + 1);
    std::copy(values.begin(), values.end(), moved.begin() + 1);
    double expected = 0.0, totals[2] = {-1.0, -1.0};
    for (const float value : values) {
      expected += double{value} * double{value};
    }
    std::vector<double> partial_sums(static_cast<size_t>(cuda::kSumBlocks), -1.0);
    const float* places[2] = {values.data(), moved.data() + 1};
    for (size_t i = 0; i < 2; ++i) {
      cuda::sum_of_squares({.values = places[i],
                            .type = FloatType::kFloat32,
                            .numel = numel,
                            .partial_sums = partial_sums.data(),
                            .total = &totals[i]},
                           nullptr);
    }
    EXPECT_NEAR(totals[0], expected, 1e-12 * expected);
    EXPECT_EQ(totals[0], totals[1]);
  }
}

}  // namespace
}  // namespace megacore
