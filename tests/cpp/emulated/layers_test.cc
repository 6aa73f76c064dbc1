// The kernels of norms, rotation and router, run on the CPU thread by thread, against their twins.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "megacore/base/low_precision.h"
#include "megacore/cuda/dense.h"
#include "megacore/cuda/dropout.h"
#include "megacore/cuda/echo_counts.h"
#include "megacore/cuda/router.h"
#include "megacore/layers/dense.h"
#include "megacore/moe/router.h"

namespace megacore {
namespace {

using cuda::FloatType;

float float_of_element(float value) { return value; }
float float_of_element(uint16_t bits) { return base::float_of_bfloat16(bits); }

// 16 bytes of them begin at a multiple of 16, as the kernels want.
template <typename Float>
class Array {
 public:
  explicit Array(int64_t numel, float value = std::numeric_limits<float>::quiet_NaN())
      : numel_(numel), memory_(static_cast<size_t>(numel) + 16 / sizeof(Float)) {
    for (int64_t i = 0; i < numel; ++i) {
      set(i, value);
    }
  }
  static Array normal(int64_t numel, unsigned seed, float width = 1.0F) {
    Array array(numel);
    std::mt19937 random(seed);
    std::normal_distribution<float> distribution(0.0F, width);
    for (int64_t i = 0; i < numel; ++i) {
      array.set(i, distribution(random));
    }
    return array;
  }
  Float* data() {
    void* start = memory_.data();
    size_t space = memory_.size() * sizeof(Float);
    return static_cast<Float*>(std::align(16, space - 16, start, space));
  }
  float at(int64_t i) { return float_of_element(data()[i]); }
  void set(int64_t i, float value) {
    if constexpr (sizeof(Float) == 4) {
      data()[i] = value;
    } else {
      data()[i] = base::bfloat16_bits(value);
    }
  }
  int64_t numel() const { return numel_; }

 private:
  int64_t numel_;
  std::vector<Float> memory_;
};

template <typename Float>
constexpr FloatType kElement = sizeof(Float) == 4 ? FloatType::kFloat32 : FloatType::kBfloat16;
template <typename Float>
constexpr float kRounding = sizeof(Float) == 4 ? 1e-5F : 8e-3F;

template <typename Float>
void expect_close(Array<Float>& found, Array<Float>& expected, float part) {
  ASSERT_EQ(found.numel(), expected.numel());
  for (int64_t i = 0; i < found.numel(); ++i) {
    const float a = found.at(i), b = expected.at(i);
    ASSERT_LE(std::fabs(a - b), part * (1.0F + std::fabs(b))) << "at " << i;
  }
}

// The sums of 32 columns are a block, which is as many threads of the host.
constexpr int64_t kWidthOfSums = 2304;

template <typename Float>
void check_norm(int64_t rows, int64_t width, bool adds) {
  SCOPED_TRACE(testing::Message() << rows << " x " << width << (adds ? " with a sum" : ""));
  auto x = Array<Float>::normal(rows * width, 1, 3.0F);
  auto weight = Array<Float>::normal(width, 2);
  auto grad = Array<Float>::normal(rows * width, 3);
  auto added = Array<Float>::normal(rows * width, 4);
  auto grad_sum = Array<Float>::normal(rows * width, 5);
  Array<Float> sum(rows * width), expected_sum = sum;
  Array<Float> y(rows * width), expected_y = y;
  Array<float> scale(rows), expected_scale = scale;
  cuda::rms_norm({.type = kElement<Float>,
                  .x = x.data(),
                  .added = adds ? added.data() : nullptr,
                  .weight = weight.data(),
                  .sum = adds ? sum.data() : nullptr,
                  .y = y.data(),
                  .scale = scale.data(),
                  .rows = rows,
                  .width = width,
                  .eps = 1e-3F},
                 nullptr);
  layers::rms_norm(x.data(), adds ? added.data() : nullptr, weight.data(), 1e-3F,
                   adds ? expected_sum.data() : nullptr, expected_y.data(), expected_scale.data(),
                   rows, width, 1);
  expect_close(y, expected_y, kRounding<Float>);
  expect_close(scale, expected_scale, 1e-6F);
  if (adds) {
    expect_close(sum, expected_sum, 0.0F);
  }

  Array<Float> expected_x(rows * width);
  Array<float> expected_weight(width);
  layers::rms_norm_backward(grad.data(), adds ? grad_sum.data() : nullptr, x.data(), weight.data(),
                            scale.data(), expected_x.data(), expected_weight.data(), rows, width,
                            1);
  for (const auto& [of_x, of_weight] : {std::pair{true, true}, {true, false}, {false, true}}) {
    if (of_weight && width > kWidthOfSums) {
      continue;
    }
    Array<Float> grad_x(rows * width), grad_weight(width);
    Array<float> sums(cuda::norm_partial_rows(kElement<Float>, rows, width) * width);
    cuda::rms_norm_backward({.type = kElement<Float>,
                             .grad_y = grad.data(),
                             .grad_sum = adds ? grad_sum.data() : nullptr,
                             .x = x.data(),
                             .weight = weight.data(),
                             .scale = scale.data(),
                             .grad_x = of_x ? grad_x.data() : nullptr,
                             .grad_weight = of_weight ? grad_weight.data() : nullptr,
                             .partial_sums = of_weight ? sums.data() : nullptr,
                             .rows = rows,
                             .width = width},
                            nullptr);
    if (of_x) {
      expect_close(grad_x, expected_x, 2 * kRounding<Float>);
    }
    for (int64_t i = 0; of_weight && i < width; ++i) {
      const float a = grad_weight.at(i), b = expected_weight.at(i);
      ASSERT_LE(std::fabs(a - b), kRounding<Float> * (1.0F + std::fabs(b))) << i;
    }
  }
}

// Rows of a warp and of a block, with one pack per thread and several, more rows than groups.
TEST(Norm, AndItsGradientsAgreeWithTheCpu) {
  for (const auto& [rows, width] : {std::pair{21, 64}, {19, 136}, {3, 1032}, {5, 2304}}) {
    for (const bool adds : {false, true}) {
      check_norm<float>(rows, width, adds);
      check_norm<uint16_t>(rows, width, adds);
    }
  }
  check_norm<float>(3, 8192, true);
  check_norm<uint16_t>(2, 16384, true);
}

TEST(Norm, TakesNoRows) {
  Array<float> weight(8, 1.0F), grad_weight(8),
      sums(8 * cuda::norm_partial_rows(FloatType::kFloat32, 0, 8));
  cuda::rms_norm({.weight = weight.data(), .rows = 0, .width = 8}, nullptr);
  cuda::rms_norm_backward({.weight = weight.data(),
                           .grad_weight = grad_weight.data(),
                           .partial_sums = sums.data(),
                           .rows = 0,
                           .width = 8},
                          nullptr);
  for (int64_t i = 0; i < 8; ++i) {
    EXPECT_EQ(grad_weight.at(i), 0.0F);
  }
}

TEST(Norm, RefusesRowsThatItsRegistersDoNotHold) {
  EXPECT_THROW(cuda::rms_norm({.rows = 1, .width = 8196}, nullptr), std::invalid_argument);
  EXPECT_THROW(cuda::rms_norm({.rows = 1, .width = 6}, nullptr), std::invalid_argument);
}

struct Heads {
  int64_t sequence, batch, groups, q_per_kv, head_dim, num_rotated;
  bool position_per_sample;
  int64_t skew = 0;  // elements before the first: no 16-byte boundary
};

template <typename Float>
void check_rotation(const Heads& h) {
  const layers::HeadShape shape = {.num_tokens = h.sequence * h.batch,
                                   .batch = h.batch,
                                   .num_groups = h.groups,
                                   .q_per_kv = h.q_per_kv,
                                   .head_dim = h.head_dim,
                                   .num_rotated = h.num_rotated,
                                   .position_per_sample = h.position_per_sample};
  const int64_t keys = shape.num_tokens * h.groups * h.head_dim;
  const int64_t positions = h.position_per_sample ? shape.num_tokens : h.sequence;
  auto cos = Array<float>::normal(positions * h.num_rotated / 2, 4);
  auto sin = Array<float>::normal(positions * h.num_rotated / 2, 5);
  for (const bool backward : {false, true}) {
    // What is read has numbers, what is written has NaN.
    std::vector<Array<Float>> found;
    for (const int64_t numel : {keys * (h.q_per_kv + 2), keys * h.q_per_kv, keys, keys}) {
      const bool is_read = found.empty() != backward;
      const auto seed = static_cast<unsigned>(6 + found.size());
      found.push_back(is_read ? Array<Float>::normal(numel + h.skew, seed)
                              : Array<Float>(numel + h.skew));
    }
    std::vector<Array<Float>> expected = found;
    const auto start = [&](Array<Float>& array) { return array.data() + h.skew; };
    cuda::split_and_rotate({.type = kElement<Float>,
                            .qkv = start(found[0]),
                            .q = start(found[1]),
                            .k = start(found[2]),
                            .v = start(found[3]),
                            .cos = cos.data(),
                            .sin = sin.data(),
                            .shape = shape,
                            .backward = backward},
                           nullptr);
    layers::split_and_rotate(start(expected[0]), start(expected[1]), start(expected[2]),
                             start(expected[3]), cos.data(), sin.data(), shape, backward, 1);
    for (size_t part = 0; part < found.size(); ++part) {
      for (int64_t i = h.skew; i < found[part].numel(); ++i) {
        const float a = found[part].at(i), b = expected[part].at(i);
        ASSERT_LE(std::fabs(a - b), kRounding<Float> * (1.0F + std::fabs(b))) << part << ' ' << i;
      }
    }
  }
}

TEST(Rotation, AndItsInverseAgreeWithTheCpu) {
  for (const Heads& heads : {Heads{3, 2, 2, 2, 32, 32, false}, Heads{2, 3, 1, 3, 64, 32, true},
                             Heads{3, 1, 2, 1, 6, 4, false}, Heads{2, 2, 1, 1, 32, 0, false},
                             Heads{2, 1, 1, 2, 48, 48, false, 1}}) {
    SCOPED_TRACE(testing::Message() << heads.head_dim << ", rotated " << heads.num_rotated);
    check_rotation<float>(heads);
    check_rotation<uint16_t>(heads);
  }
}

template <typename Float>
void check_normed_rotation(const Heads& h) {
  const layers::HeadShape shape = {.num_tokens = h.sequence * h.batch,
                                   .batch = h.batch,
                                   .num_groups = h.groups,
                                   .q_per_kv = h.q_per_kv,
                                   .head_dim = h.head_dim,
                                   .num_rotated = h.num_rotated,
                                   .position_per_sample = h.position_per_sample};
  const int64_t keys = shape.num_tokens * h.groups * h.head_dim;
  const int64_t positions = h.position_per_sample ? shape.num_tokens : h.sequence;
  auto cos = Array<float>::normal(positions * h.num_rotated / 2, 4);
  auto sin = Array<float>::normal(positions * h.num_rotated / 2, 5);
  auto qkv = Array<Float>::normal(keys * (h.q_per_kv + 2), 6, 3.0F);
  auto q_weight = Array<Float>::normal(h.head_dim, 7);
  auto k_weight = Array<Float>::normal(h.head_dim, 8);
  Array<Float> q(keys * h.q_per_kv), k(keys), v(keys);
  Array<float> scale(shape.num_tokens * h.groups * (h.q_per_kv + 1));
  cuda::NormRotateParams params = {.heads = {.type = kElement<Float>,
                                             .qkv = qkv.data(),
                                             .q = q.data(),
                                             .k = k.data(),
                                             .v = v.data(),
                                             .cos = cos.data(),
                                             .sin = sin.data(),
                                             .shape = shape},
                                   .q_weight = q_weight.data(),
                                   .k_weight = k_weight.data(),
                                   .eps = 1e-3F,
                                   .scale = scale.data()};
  cuda::norm_and_rotate(params, nullptr);
  Array<Float> expected_q(q.numel()), expected_k(keys), expected_v(keys);
  Array<float> expected_scale(scale.numel());
  const layers::HeadNorms<Float> norms = {q_weight.data(), k_weight.data(), 1e-3F,
                                          expected_scale.data()};
  layers::norm_and_rotate(qkv.data(), norms, expected_q.data(), expected_k.data(),
                          expected_v.data(), cos.data(), sin.data(), shape, 1);
  expect_close(q, expected_q, 2 * kRounding<Float>);
  expect_close(k, expected_k, 2 * kRounding<Float>);
  expect_close(v, expected_v, 0.0F);
  expect_close(scale, expected_scale, 1e-6F);

  // Now q, k and v are gradients.
  Array<Float> expected_qkv(qkv.numel());
  Array<float> expected_qw(h.head_dim), expected_kw(h.head_dim);
  layers::norm_and_rotate_backward<Float>(
      {q.data(), k.data(), v.data(), expected_qkv.data(), expected_qw.data(), expected_kw.data()},
      qkv.data(), norms, cos.data(), sin.data(), shape, 1);
  params.x = qkv.data();
  params.heads.backward = true;
  const int64_t heads = shape.num_tokens * h.groups * (h.q_per_kv + 2);
  for (const auto& [of_qkv, of_weights] : {std::pair{true, true}, {true, false}, {false, true}}) {
    Array<Float> grad(qkv.numel()), grad_qw(h.head_dim), grad_kw(h.head_dim);
    Array<float> sums(cuda::norm_rotate_partial_rows(heads) * 2 * h.head_dim);
    params.heads.qkv = of_qkv ? grad.data() : nullptr;
    params.grad_q_weight = of_weights ? grad_qw.data() : nullptr;
    params.grad_k_weight = of_weights ? grad_kw.data() : nullptr;
    params.partial_sums = of_weights ? sums.data() : nullptr;
    cuda::norm_and_rotate(params, nullptr);
    if (of_qkv) {
      expect_close(grad, expected_qkv, 4 * kRounding<Float>);
    }
    for (int64_t i = 0; of_weights && i < h.head_dim; ++i) {
      ASSERT_NEAR(grad_qw.at(i), expected_qw.at(i),
                  2 * kRounding<Float> * (1.0F + std::fabs(expected_qw.at(i))));
      ASSERT_NEAR(grad_kw.at(i), expected_kw.at(i),
                  2 * kRounding<Float> * (1.0F + std::fabs(expected_kw.at(i))));
    }
  }
}

// Several heads to a warp and one, all lanes and some, whole heads rotated and parts.
TEST(NormedRotation, AndItsGradientsAgreeWithTheCpu) {
  for (const Heads& heads :
       {Heads{5, 2, 2, 2, 32, 32, false}, Heads{2, 3, 1, 3, 64, 32, true},
        Heads{3, 1, 2, 1, 96, 64, false}, Heads{2, 1, 1, 2, 256, 128, false}}) {
    SCOPED_TRACE(testing::Message() << heads.head_dim << ", rotated " << heads.num_rotated);
    check_normed_rotation<float>(heads);
    check_normed_rotation<uint16_t>(heads);
  }
}

TEST(NormedRotation, RefusesHeadsThatItsLanesDoNotHold) {
  layers::HeadShape shape = {.num_tokens = 1,
                             .batch = 1,
                             .num_groups = 1,
                             .q_per_kv = 1,
                             .head_dim = 512,
                             .num_rotated = 512,
                             .position_per_sample = false};
  EXPECT_THROW(cuda::norm_and_rotate({.heads = {.shape = shape}}, nullptr), std::invalid_argument);
  shape.head_dim = shape.num_rotated = 12;
  EXPECT_THROW(cuda::norm_and_rotate({.heads = {.shape = shape}}, nullptr), std::invalid_argument);
}

TEST(Rotation, RefusesOddHeads) {
  const layers::HeadShape shape = {.num_tokens = 1,
                                   .batch = 1,
                                   .num_groups = 1,
                                   .q_per_kv = 1,
                                   .head_dim = 5,
                                   .num_rotated = 2,
                                   .position_per_sample = false};
  EXPECT_THROW(cuda::split_and_rotate({.shape = shape}, nullptr), std::invalid_argument);
}

template <typename Float>
void check_dropout(int64_t width, int64_t skew, bool key_on_device) {
  const layers::DropoutRule rule = {
      .sequence = 5, .batch = 3, .width = width, .threshold = -(int64_t{1} << 62), .factor = 1.3F};
  const std::vector<int64_t> samples = {int64_t{1} << 40, 0, 7};
  const std::vector<int64_t> positions = {0, 1, 2, 90, 91};
  const int64_t key = -3, numel = 15 * width + skew;
  auto x = Array<Float>::normal(numel, 1);
  Array<Float> y(numel), expected = y;
  cuda::dropout({.type = kElement<Float>,
                 .x = x.data() + skew,
                 .sample_ids = samples.data(),
                 .positions = positions.data(),
                 .key = key_on_device ? &key : nullptr,
                 .key_value = key_on_device ? 0 : key,
                 .y = y.data() + skew,
                 .rule = rule},
                nullptr);
  layers::dropout(x.data() + skew, samples.data(), positions.data(), key, rule,
                  expected.data() + skew, 1);
  int64_t dropped = 0;
  for (int64_t i = skew; i < numel; ++i) {
    ASSERT_EQ(y.at(i), expected.at(i)) << i;
    dropped += y.at(i) == 0.0F ? 1 : 0;
  }
  EXPECT_NEAR(static_cast<double>(dropped) / static_cast<double>(15 * width), 0.25, 0.15);
}

TEST(Dropout, HasTheBitsOfTheCpu) {
  for (const bool key_on_device : {false, true}) {
    check_dropout<float>(36, 0, key_on_device);
    check_dropout<uint16_t>(136, 0, key_on_device);
    check_dropout<uint16_t>(33, 1, key_on_device);
  }
}

struct RouterResults {
  Array<float> probs, stats, losses;
  std::vector<int64_t> ids, seen;
  explicit RouterResults(const moe::RouterRule& rule)
      : probs(rule.num_tokens * rule.top_k),
        stats(2 * rule.num_pools * rule.num_experts),
        losses(2),
        ids(static_cast<size_t>(rule.num_tokens * rule.top_k), -1),
        seen(static_cast<size_t>(rule.num_experts), 7) {}
  moe::Routed pointers(bool has_z) {
    return {.probs = probs.data(),
            .ids = ids.data(),
            .sums = {.stats = stats.data(),
                     .losses = losses.data(),
                     .seen = seen.data(),
                     .scales = {.aux = 0.5F, .z = has_z ? 0.25F : 0.0F}}};
  }
};

void check_router_gradient(const moe::RouterRule& rule,
                           Array<float>& logits,
                           const std::vector<int64_t>& ids) {
  auto grad_probs = Array<float>::normal(rule.num_tokens * rule.top_k, 13);
  auto counts = Array<float>::normal(rule.num_pools * rule.num_experts, 14);
  auto factors = Array<float>::normal(rule.num_pools + 2, 15);
  Array<float> grad(logits.numel()), expected = grad;
  const moe::LossFactors one = {factors.data(), 1};
  const moe::LossFactors of_pools = {factors.data(), rule.num_pools};
  for (const auto& [aux, z] : {std::pair{moe::LossFactors{}, moe::LossFactors{}},
                               std::pair{of_pools, moe::LossFactors{}}, std::pair{one, of_pools}}) {
    const moe::RouterGrads grads = {.probs = grad_probs.data(),
                                    .counts = aux.values == nullptr ? nullptr : counts.data(),
                                    .aux = aux,
                                    .z = z,
                                    .scales = {.aux = 0.5F, .z = 0.25F}};
    cuda::route_backward({.grads = grads,
                          .logits = logits.data(),
                          .ids = ids.data(),
                          .grad_logits = grad.data(),
                          .rule = rule},
                         nullptr);
    moe::route_backward(grads, logits.data(), ids.data(), expected.data(), rule, 1);
    expect_close(grad, expected, 1e-5F);
  }
}

void check_router(const moe::RouterRule& rule, bool has_bias, bool keeps_ids) {
  auto logits = Array<float>::normal(rule.num_tokens * rule.num_experts, 11, 2.0F);
  auto bias = Array<float>::normal(rule.num_experts, 12, 0.1F);
  const float* added = has_bias ? bias.data() : nullptr;
  RouterResults found(rule), expected(rule);
  Array<float> workspace(cuda::route_workspace_numel(rule));
  if (keeps_ids) {  // any choices, also twice the same
    for (size_t i = 0; i < found.ids.size(); ++i) {
      found.ids[i] = expected.ids[i] = static_cast<int64_t>(i * 7) % rule.num_experts;
    }
  }
  cuda::route({.logits = logits.data(),
               .bias = added,
               .keeps_ids = keeps_ids,
               .rule = rule,
               .routed = found.pointers(has_bias || keeps_ids),
               .workspace = workspace.data()},
              nullptr);
  moe::route(logits.data(), added, keeps_ids, rule, expected.pointers(has_bias || keeps_ids), 1);
  EXPECT_EQ(found.ids, expected.ids);
  EXPECT_EQ(found.seen, expected.seen);
  expect_close(found.probs, expected.probs, 1e-5F);
  expect_close(found.stats, expected.stats, 1e-5F);
  expect_close(found.losses, expected.losses, 1e-5F);
  check_router_gradient(rule, logits, expected.ids);
}

TEST(Router, WithoutSumsNeedsNoWorkspace) {
  const moe::RouterRule rule = {.num_tokens = 9,
                                .num_experts = 40,
                                .top_k = 3,
                                .num_pools = 1,
                                .is_sigmoid = false,
                                .softmax_after_top_k = false,
                                .normalize = true,
                                .scaling = 1.0F};
  auto logits = Array<float>::normal(rule.num_tokens * rule.num_experts, 11, 2.0F);
  RouterResults found(rule), expected(rule);
  cuda::route({.logits = logits.data(),
               .rule = rule,
               .routed = {.probs = found.probs.data(), .ids = found.ids.data()}},
              nullptr);
  moe::route(logits.data(), nullptr, false, rule,
             {.probs = expected.probs.data(), .ids = expected.ids.data()}, 1);
  EXPECT_EQ(found.ids, expected.ids);
  expect_close(found.probs, expected.probs, 1e-5F);
}

TEST(Router, HasLossesOfZeroWithoutPools) {
  moe::RouterRule rule = {};
  rule.num_experts = 4;
  rule.top_k = 2;
  RouterResults found(rule), expected(rule);
  cuda::route({.rule = rule, .routed = found.pointers(true)}, nullptr);
  moe::route(nullptr, nullptr, false, rule, expected.pointers(true), 1);
  expect_close(found.losses, expected.losses, 0.0F);
  EXPECT_EQ(found.losses.at(1), 0.0F);
}

TEST(Router, AndItsGradientAgreeWithTheCpu) {
  for (const auto& [is_sigmoid, after, normalize] :
       {std::tuple{false, false, true}, std::tuple{false, false, false},
        std::tuple{true, false, true}, std::tuple{false, true, false}}) {
    for (const auto& [tokens, experts, k, pools] :
         {std::tuple{81, 8, 2, 1}, std::tuple{20, 70, 6, 2}, std::tuple{4, 1, 1, 4}}) {
      SCOPED_TRACE(testing::Message()
                   << experts << " experts, " << is_sigmoid << after << normalize);
      const moe::RouterRule rule = {.num_tokens = tokens,
                                    .num_experts = experts,
                                    .top_k = k,
                                    .num_pools = pools,
                                    .is_sigmoid = is_sigmoid,
                                    .softmax_after_top_k = after,
                                    .normalize = normalize,
                                    .scaling = 2.5F};
      check_router(rule, is_sigmoid, false);
      check_router(rule, false, true);
    }
  }
  check_router({.num_tokens = 3,
                .num_experts = 1000,
                .top_k = 32,
                .num_pools = 1,
                .is_sigmoid = false,
                .softmax_after_top_k = false,
                .normalize = true,
                .scaling = 1.0F},
               false, false);
}

TEST(Router, HasSumsWithoutTokens) {
  const moe::RouterRule rule = {.num_tokens = 0,
                                .num_experts = 4,
                                .top_k = 2,
                                .num_pools = 1,
                                .is_sigmoid = false,
                                .softmax_after_top_k = false,
                                .normalize = true,
                                .scaling = 1.0F};
  check_router(rule, false, false);
}

TEST(Router, RefusesMoreThanItsLanesHold) {
  moe::RouterRule rule = {.num_tokens = 1,
                          .num_experts = 1025,
                          .top_k = 2,
                          .num_pools = 1,
                          .is_sigmoid = false,
                          .softmax_after_top_k = false,
                          .normalize = true,
                          .scaling = 1.0F};
  EXPECT_THROW(cuda::route({.rule = rule}, nullptr), std::invalid_argument);
  rule.num_experts = 64;
  rule.top_k = 33;
  EXPECT_THROW(cuda::route({.rule = rule}, nullptr), std::invalid_argument);
}

TEST(EchoCounts, AreThoseOfTheCpu) {
  for (const auto& [ranks, local, slots] :
       {std::tuple{1, 1, 0}, std::tuple{3, 2, 2}, std::tuple{8, 40, 5}}) {
    const moe::PlanShape shape = {
        .num_ranks = ranks, .num_experts = ranks * local, .num_spare_slots = slots};
    std::mt19937 random(5);
    const auto numbers = [&](int64_t numel, int64_t low, int64_t high) {
      std::uniform_int_distribution<int64_t> any(low, high);
      std::vector<int64_t> values(static_cast<size_t>(numel));
      std::generate(values.begin(), values.end(), [&] { return any(random); });
      return values;
    };
    const std::vector<int64_t> held = numbers(ranks * slots, -1, shape.num_experts - 1);
    const std::vector<int64_t> tokens = numbers(ranks * (local + slots), 0, 1000);
    const std::vector<int64_t> loads = numbers(ranks, 0, 100'000);
    const moe::PlanSummary summary = {.max_load = 1234, .num_clones = 3, .num_moved = 777};
    const int64_t elapsed = 98'765;
    const moe::EchoReport report = {loads.data(), &summary, &elapsed};
    std::vector<double> sums(moe::kNumEchoSums, 0.5), expected_sums = sums;
    std::vector<int64_t> copies(static_cast<size_t>(shape.num_experts), -1), expected = copies;
    cuda::count_plan(shape, report, held.data(), tokens.data(), copies.data(), sums.data(),
                     nullptr);
    moe::count_plan(shape, report, held.data(), tokens.data(), expected.data(),
                    expected_sums.data());
    cuda::count_held(held.data(), std::ssize(held), 1, 4, 1000, sums.data(), nullptr);
    moe::count_held(held.data(), std::ssize(held), 1, 4, 1000, expected_sums.data());
    EXPECT_EQ(copies, expected);
    EXPECT_EQ(sums, expected_sums);
  }
}

}  // namespace
}  // namespace megacore
