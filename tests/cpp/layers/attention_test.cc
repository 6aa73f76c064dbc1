#include "megacore/layers/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "megacore/base/low_precision.h"

namespace megacore::layers {
namespace {

// A tensor (token, batch, head, element), as models have it.
struct Tokens {
  Tokens(int64_t tokens, int64_t batch, int64_t heads, int64_t dim)
      : tokens(tokens),
        batch(batch),
        heads(heads),
        dim(dim),
        values(static_cast<size_t>(tokens * batch * heads * dim), std::nanf("")) {}

  HeadStrides strides() const { return {heads * dim, dim, batch * heads * dim}; }
  HeadsSource source() const { return {moe::Source(values.data()), strides()}; }
  HeadsTarget target() { return {moe::Target(values.data()), strides()}; }
  double at(int64_t b, int64_t head, int64_t token, int64_t i) const {
    return values[static_cast<size_t>(((token * batch + b) * heads + head) * dim + i)];
  }

  int64_t tokens, batch, heads, dim;
  std::vector<float> values;
};

Tokens drawn(int64_t tokens, int64_t batch, int64_t heads, int64_t dim, std::mt19937& random) {
  Tokens result(tokens, batch, heads, dim);
  std::normal_distribution<float> normal;
  for (float& value : result.values) {
    value = normal(random);
  }
  return result;
}

struct Case {
  AttentionShape s;
  Tokens q, k, v, grad;
};

Case drawn_case(const AttentionShape& s, unsigned seed) {
  std::mt19937 random(seed);
  return {s, drawn(s.queries, s.batch, s.heads, s.dim, random),
          drawn(s.keys, s.batch, s.key_heads, s.dim, random),
          drawn(s.keys, s.batch, s.key_heads, s.value_dim, random),
          drawn(s.queries, s.batch, s.heads, s.value_dim, random)};
}

struct Results {
  Tokens mixed, grad_q, grad_k, grad_v;
  std::vector<float> lse;
};

Results compute(const Case& c, int num_threads) {
  const AttentionShape& s = c.s;
  Results r{Tokens(s.queries, s.batch, s.heads, s.value_dim),
            Tokens(s.queries, s.batch, s.heads, s.dim), Tokens(s.keys, s.batch, s.key_heads, s.dim),
            Tokens(s.keys, s.batch, s.key_heads, s.value_dim),
            std::vector<float>(static_cast<size_t>(s.batch * s.heads * s.queries))};
  attention(s, c.q.source(), c.k.source(), c.v.source(), r.mixed.target(), r.lse.data(),
            num_threads);
  const AttentionPass pass{c.grad.source(), c.q.source(),     c.k.source(),
                           c.v.source(),    r.mixed.source(), r.lse.data()};
  attention_backward(s, pass, r.grad_q.target(), r.grad_k.target(), r.grad_v.target(), num_threads);
  return r;
}

// The same in doubles, one query after the other.
struct Expected {
  std::vector<double> mixed, grad_q, grad_k, grad_v, lse;
};

void add_query(const Case& c, int64_t b, int64_t head, int64_t query, Expected& e) {
  const AttentionShape& s = c.s;
  const int64_t key_head = head / (s.heads / s.key_heads);
  const int64_t seen = s.is_causal ? std::min(s.keys, query + 1) : s.keys;
  const auto place = [&](const Tokens& t, int64_t h, int64_t token, int64_t i) {
    return static_cast<size_t>(((token * s.batch + b) * t.heads + h) * t.dim + i);
  };
  std::vector<double> weights(static_cast<size_t>(seen)), grads(weights.size());
  double sum = 0.0;
  double mean = 0.0;
  for (int64_t key = 0; key < seen; ++key) {
    double score = 0.0;
    for (int64_t i = 0; i < s.dim; ++i) {
      score += c.q.at(b, head, query, i) * c.k.at(b, key_head, key, i);
    }
    sum += weights[static_cast<size_t>(key)] = std::exp(score * s.scale);
  }
  e.lse[static_cast<size_t>((b * s.heads + head) * s.queries + query)] = std::log(sum);
  for (int64_t key = 0; key < seen; ++key) {
    const auto at = static_cast<size_t>(key);
    weights[at] /= sum;
    for (int64_t i = 0; i < s.value_dim; ++i) {
      const double grad = c.grad.at(b, head, query, i);
      e.mixed[place(c.grad, head, query, i)] += weights[at] * c.v.at(b, key_head, key, i);
      e.grad_v[place(c.v, key_head, key, i)] += weights[at] * grad;
      grads[at] += grad * c.v.at(b, key_head, key, i);
    }
    mean += weights[at] * grads[at];
  }
  for (int64_t key = 0; key < seen; ++key) {
    const auto at = static_cast<size_t>(key);
    const double grad = weights[at] * (grads[at] - mean) * s.scale;
    for (int64_t i = 0; i < s.dim; ++i) {
      e.grad_q[place(c.q, head, query, i)] += grad * c.k.at(b, key_head, key, i);
      e.grad_k[place(c.k, key_head, key, i)] += grad * c.q.at(b, head, query, i);
    }
  }
}

Expected expected_of(const Case& c) {
  const AttentionShape& s = c.s;
  Expected e;
  e.mixed.resize(c.grad.values.size());
  e.grad_q.resize(c.q.values.size());
  e.grad_k.resize(c.k.values.size());
  e.grad_v.resize(c.v.values.size());
  e.lse.resize(static_cast<size_t>(s.batch * s.heads * s.queries));
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t head = 0; head < s.heads; ++head) {
      for (int64_t query = 0; query < s.queries; ++query) {
        add_query(c, b, head, query, e);
      }
    }
  }
  return e;
}

double relative_error(const std::vector<float>& found, const std::vector<double>& expected) {
  double error = 0.0;
  double norm = 1e-30;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += std::pow(found[i] - expected[i], 2);
    norm += std::pow(expected[i], 2);
  }
  return std::sqrt(error / norm);
}

void expect_near(const Results& r, const Expected& e, double tolerance) {
  EXPECT_LT(relative_error(r.mixed.values, e.mixed), tolerance);
  EXPECT_LT(relative_error(r.lse, e.lse), tolerance);
  EXPECT_LT(relative_error(r.grad_q.values, e.grad_q), tolerance);
  EXPECT_LT(relative_error(r.grad_k.values, e.grad_k), tolerance);
  EXPECT_LT(relative_error(r.grad_v.values, e.grad_v), tolerance);
}

AttentionShape shape_of(
    int64_t heads, int64_t key_heads, int64_t queries, int64_t keys, int64_t dim, int64_t values) {
  return {.batch = 2,
          .heads = heads,
          .key_heads = key_heads,
          .queries = queries,
          .keys = keys,
          .dim = dim,
          .value_dim = values,
          .scale = 0.3F,
          .is_causal = false};
}

// Sizes around those of tiles and blocks, with more keys than queries and fewer.
const AttentionShape kShapes[] = {
    shape_of(1, 1, 1, 1, 1, 1),      shape_of(4, 2, 31, 31, 24, 24),
    shape_of(2, 1, 129, 129, 7, 12), shape_of(3, 3, 17, 530, 33, 8),
    shape_of(2, 2, 270, 40, 16, 40), shape_of(1, 1, 97, 97, 256, 250)};

TEST(Attention, ResultsAndGradientsAreThoseOfTheFormula) {
  unsigned seed = 0;
  for (AttentionShape shape : kShapes) {
    for (const bool is_causal : {false, true}) {
      shape.is_causal = is_causal;
      SCOPED_TRACE(++seed);
      const Case c = drawn_case(shape, seed);
      expect_near(compute(c, 1), expected_of(c), 3e-6);
    }
  }
}

TEST(Attention, ResultsDoNotDependOnTheNumberOfThreads) {
  for (AttentionShape shape : kShapes) {
    shape.is_causal = true;
    const Case c = drawn_case(shape, 5);
    const Results one = compute(c, 1);
    for (const int num_threads : {2, 7}) {
      const Results many = compute(c, num_threads);
      EXPECT_EQ(many.mixed.values, one.mixed.values);
      EXPECT_EQ(many.lse, one.lse);
      EXPECT_EQ(many.grad_q.values, one.grad_q.values);
      EXPECT_EQ(many.grad_k.values, one.grad_k.values);
      EXPECT_EQ(many.grad_v.values, one.grad_v.values);
    }
  }
}

// Scores far below the largest one, and far from zero.
TEST(Attention, LargeScoresNeitherOverflowNorVanish) {
  AttentionShape shape = shape_of(1, 1, 300, 300, 16, 16);
  shape.scale = 40.0F;
  shape.is_causal = true;
  const Case c = drawn_case(shape, 1);
  const Results r = compute(c, 1);
  for (const float value : r.mixed.values) {
    ASSERT_TRUE(std::isfinite(value));
  }
  for (const float value : r.grad_q.values) {
    ASSERT_TRUE(std::isfinite(value));
  }
}

TEST(Attention, SixteenBitsAreWidenedAndRoundedOnce) {
  const AttentionShape shape = shape_of(2, 1, 70, 70, 24, 24);
  Case c = drawn_case(shape, 3);
  std::vector<std::vector<uint16_t>> narrow;
  for (Tokens* tokens : {&c.q, &c.k, &c.v}) {
    narrow.emplace_back();
    for (float& value : tokens->values) {
      narrow.back().push_back(base::bfloat16_bits(value));
      value = base::float_of_bfloat16(narrow.back().back());
    }
  }
  const Results wide = compute(c, 1);
  std::vector<uint16_t> mixed(wide.mixed.values.size());
  std::vector<float> lse(wide.lse.size());
  const auto format = moe::NumberFormat::kBFloat16;
  attention(shape, {{narrow[0].data(), format}, c.q.strides()},
            {{narrow[1].data(), format}, c.k.strides()},
            {{narrow[2].data(), format}, c.v.strides()},
            {{mixed.data(), format}, wide.mixed.strides()}, lse.data(), 1);
  EXPECT_EQ(lse, wide.lse);
  for (size_t i = 0; i < mixed.size(); ++i) {
    ASSERT_EQ(mixed[i], base::bfloat16_bits(wide.mixed.values[i]));
  }
}

}  // namespace
}  // namespace megacore::layers
