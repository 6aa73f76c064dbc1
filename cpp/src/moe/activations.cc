#include "megacore/moe/activations.h"

#include <algorithm>
#include <cmath>

#include "megacore/base/check.h"
#include "megacore/base/exponential.h"
#include "megacore/base/lane_sum.h"
#include "megacore/base/low_precision.h"
#include "megacore/base/parallel_for.h"
#include "megacore/base/vector_clones.h"
#include "megacore/moe/grouped_arguments.h"

namespace megacore::moe {
namespace {

// Elements of work that are worth a thread.
constexpr int64_t kGrainNumel = 1 << 14;

using base::exponential;
using base::narrow;
using base::widen;

[[gnu::always_inline]] inline float sigmoid(float x) { return 1.0F / (1.0F + exponential(-x)); }

// 0.5 (1 + tanh(u)) = sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
constexpr float kGeluScale = 1.5957691216057308F;
constexpr float kGeluCubic = 0.044715F;

[[gnu::always_inline]] inline float gelu_sigmoid(float x) {
  return sigmoid(kGeluScale * (x + kGeluCubic * x * x * x));
}

template <typename Float>
MC_VECTOR_CLONES_V4 void swiglu_row(const Float* __restrict__ x,
                                    float prob,
                                    Float* __restrict__ y,
                                    int64_t width) {
  for (int64_t i = 0; i < width; ++i) {
    const float gate = widen(x[i]);
    narrow(prob * (gate * sigmoid(gate) * widen(x[width + i])), y[i]);
  }
}

template <typename Float>
MC_VECTOR_CLONES_V4 void gelu_row(const Float* __restrict__ x,
                                  float prob,
                                  Float* __restrict__ y,
                                  int64_t width) {
  for (int64_t i = 0; i < width; ++i) {
    const float value = widen(x[i]);
    narrow(prob * (value * gelu_sigmoid(value)), y[i]);
  }
}

// Products for the gradient of the weight of a row are kept for a stretch and then added in lanes:
// the loop over them vectorises, and the order of the sum depends on the width only.
constexpr int64_t kStretch = 256;

// Both return the gradient of the weight of the row.
template <typename Float>
MC_VECTOR_CLONES_V4 float swiglu_backward_row(const Float* __restrict__ grad_y,
                                              const Float* __restrict__ x,
                                              float prob,
                                              Float* __restrict__ grad_x,
                                              int64_t width) {
  float lanes[base::kLanes] = {};
  for (int64_t start = 0; start < width; start += kStretch) {
    const int64_t count = std::min(kStretch, width - start);
    float products[kStretch];
    for (int64_t j = 0; j < count; ++j) {
      const int64_t i = start + j;
      const float grad = widen(grad_y[i]);
      const float gate = widen(x[i]);
      const float up = widen(x[width + i]);
      const float s = sigmoid(gate);
      const float silu = gate * s;
      products[j] = grad * (silu * up);
      const float weighted = grad * prob;
      narrow(weighted * up * (s * (1.0F + gate * (1.0F - s))), grad_x[i]);
      narrow(weighted * silu, grad_x[width + i]);
    }
    base::add_to_lanes(
        count, [&](int64_t j) __attribute__((always_inline)) { return products[j]; }, lanes);
  }
  return base::sum_of_lanes(lanes);
}

template <typename Float>
MC_VECTOR_CLONES_V4 float gelu_backward_row(const Float* __restrict__ grad_y,
                                            const Float* __restrict__ x,
                                            float prob,
                                            Float* __restrict__ grad_x,
                                            int64_t width) {
  float lanes[base::kLanes] = {};
  for (int64_t start = 0; start < width; start += kStretch) {
    const int64_t count = std::min(kStretch, width - start);
    float products[kStretch];
    for (int64_t j = 0; j < count; ++j) {
      const int64_t i = start + j;
      const float grad = widen(grad_y[i]);
      const float value = widen(x[i]);
      const float s = gelu_sigmoid(value);
      const float inner = kGeluScale * (1.0F + 3.0F * kGeluCubic * value * value);
      products[j] = grad * (value * s);
      narrow(grad * prob * (s * (1.0F + value * (1.0F - s) * inner)), grad_x[i]);
    }
    base::add_to_lanes(
        count, [&](int64_t j) __attribute__((always_inline)) { return products[j]; }, lanes);
  }
  return base::sum_of_lanes(lanes);
}

int64_t input_width(Activation kind, const ActivationShape& shape) {
  return kind == Activation::kSwiglu ? 2 * shape.width : shape.width;
}

int64_t rows_in_use(const ActivationShape& shape) {
  return shape.num_rows == nullptr ? shape.rows : usable_count(*shape.num_rows, shape.rows);
}

int64_t grain(const ActivationShape& shape, int num_threads) {
  MC_REQUIRE(shape.rows >= 0 && shape.width >= 0, "a size is negative");
  MC_REQUIRE(num_threads >= 1, "num_threads must be at least 1, got {}", num_threads);
  return std::max(int64_t{1}, kGrainNumel / std::max(int64_t{1}, shape.width));
}

}  // namespace

template <typename Float>
void activate(Activation kind,
              const Float* x,
              const float* probs,
              Float* y,
              const ActivationShape& shape,
              int num_threads) {
  const int64_t stride = input_width(kind, shape);
  const auto one_row = kind == Activation::kSwiglu ? swiglu_row<Float> : gelu_row<Float>;
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float prob = probs == nullptr ? 1.0F : probs[row];
      one_row(x + row * stride, prob, y + row * shape.width, shape.width);
    }
  };
  base::parallel_for(rows_in_use(shape), grain(shape, num_threads), num_threads, run);
}

template <typename Float>
void activate_backward(Activation kind,
                       const Float* grad_y,
                       const Float* x,
                       const float* probs,
                       Float* grad_x,
                       float* grad_probs,
                       const ActivationShape& shape,
                       int num_threads) {
  const int64_t stride = input_width(kind, shape);
  const auto one_row =
      kind == Activation::kSwiglu ? swiglu_backward_row<Float> : gelu_backward_row<Float>;
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float prob = probs == nullptr ? 1.0F : probs[row];
      const float grad_prob = one_row(grad_y + row * shape.width, x + row * stride, prob,
                                      grad_x + row * stride, shape.width);
      if (probs != nullptr) {
        grad_probs[row] = grad_prob;
      }
    }
  };
  base::parallel_for(rows_in_use(shape), grain(shape, num_threads), num_threads, run);
}

#define MC_INSTANTIATE(Float)                                                                  \
  template void activate<Float>(Activation, const Float*, const float*, Float*,                \
                                const ActivationShape&, int);                                  \
  template void activate_backward<Float>(Activation, const Float*, const Float*, const float*, \
                                         Float*, float*, const ActivationShape&, int);
MC_INSTANTIATE(float)
MC_INSTANTIATE(uint16_t)

}  // namespace megacore::moe
