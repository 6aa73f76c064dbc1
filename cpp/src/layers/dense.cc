#include "megacore/layers/dense.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "megacore/base/check.h"
#include "megacore/base/lane_sum.h"
#include "megacore/base/low_precision.h"
#include "megacore/base/parallel_for.h"
#include "megacore/base/vector_clones.h"

namespace megacore::layers {
namespace {

// Elements of work that are worth a thread.
constexpr int64_t kGrainNumel = 1 << 15;
// Rows whose part of the gradient of the weight is summed first.
constexpr int64_t kRowsOfSum = 256;

using base::kLanes;
using base::narrow;
using base::sum;
using base::widen;

template <typename Float>
[[gnu::always_inline]] inline float norm_row(const Float* __restrict__ x,
                                             const Float* __restrict__ weight,
                                             float eps,
                                             Float* __restrict__ y,
                                             int64_t width) {
  const float squares = sum(
      width, [x](int64_t i) __attribute__((always_inline)) { return widen(x[i]) * widen(x[i]); });
  const float scale = 1.0F / std::sqrt(squares / static_cast<float>(width) + eps);
  for (int64_t i = 0; i < width; ++i) {
    narrow(widen(x[i]) * scale * widen(weight[i]), y[i]);
  }
  return scale;
}

template <typename Float>
[[gnu::always_inline]] inline void norm_grad_row(const Float* __restrict__ grad,
                                                 const Float* __restrict__ x,
                                                 const Float* __restrict__ weight,
                                                 float scale,
                                                 Float* __restrict__ grad_x,
                                                 int64_t width) {
  const float radial = sum(width,
                           [=](int64_t i) __attribute__((always_inline)) {
                             return widen(grad[i]) * widen(weight[i]) * (widen(x[i]) * scale);
                           }) /
                       static_cast<float>(width);
  for (int64_t i = 0; i < width; ++i) {
    const float unit = widen(x[i]) * scale;
    narrow((widen(grad[i]) * widen(weight[i]) - unit * radial) * scale, grad_x[i]);
  }
}

template <typename Float>
[[gnu::always_inline]] inline void add_weight_grad_row(const Float* __restrict__ grad,
                                                       const Float* __restrict__ x,
                                                       float scale,
                                                       float* __restrict__ total,
                                                       int64_t width) {
  for (int64_t i = 0; i < width; ++i) {
    total[i] += widen(grad[i]) * (widen(x[i]) * scale);
  }
}

// sum may be x.
template <typename Float>
[[gnu::always_inline]] inline void add_row(const Float* x,
                                           const Float* added,
                                           Float* sum,
                                           int64_t width) {
#pragma GCC ivdep
  for (int64_t i = 0; i < width; ++i) {
    narrow(widen(x[i]) + widen(added[i]), sum[i]);
  }
}

// `direction` is -1 for the inverse rotation, which is the adjoint.
template <typename Float>
[[gnu::always_inline]] inline void rotate_head(const Float* __restrict__ from,
                                               Float* __restrict__ to,
                                               const float* __restrict__ cos,
                                               const float* __restrict__ sin,
                                               int64_t half,
                                               int64_t head_dim,
                                               float direction) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = widen(from[i]);
    const float second = widen(from[half + i]);
    narrow(first * cos[i] - second * (direction * sin[i]), to[i]);
    narrow(second * cos[i] + first * (direction * sin[i]), to[half + i]);
  }
  for (int64_t i = 2 * half; i < head_dim; ++i) {
    to[i] = from[i];
  }
}

// Only plain functions can be compiled once per vector width.
#define MC_DENSE_ROWS(Float)                                                                      \
  MC_VECTOR_CLONES_V4 float one_norm(const Float* __restrict__ x,                                 \
                                     const Float* __restrict__ weight, float eps,                 \
                                     Float* __restrict__ y, int64_t width) {                      \
    return norm_row(x, weight, eps, y, width);                                                    \
  }                                                                                               \
  MC_VECTOR_CLONES_V4 void one_norm_grad(                                                         \
      const Float* __restrict__ grad, const Float* __restrict__ x,                                \
      const Float* __restrict__ weight, float scale, Float* __restrict__ grad_x, int64_t width) { \
    norm_grad_row(grad, x, weight, scale, grad_x, width);                                         \
  }                                                                                               \
  MC_VECTOR_CLONES_V4 void one_weight_grad(const Float* __restrict__ grad,                        \
                                           const Float* __restrict__ x, float scale,              \
                                           float* __restrict__ total, int64_t width) {            \
    add_weight_grad_row(grad, x, scale, total, width);                                            \
  }                                                                                               \
  MC_VECTOR_CLONES_V4 void one_sum(const Float* x, const Float* added, Float* sum,                \
                                   int64_t width) {                                               \
    add_row(x, added, sum, width);                                                                \
  }                                                                                               \
  MC_VECTOR_CLONES_V4 void one_rotation(                                                          \
      const Float* __restrict__ from, Float* __restrict__ to, const float* __restrict__ cos,      \
      const float* __restrict__ sin, int64_t half, int64_t head_dim, float direction) {           \
    rotate_head(from, to, cos, sin, half, head_dim, direction);                                   \
  }

MC_DENSE_ROWS(float)
MC_DENSE_ROWS(uint16_t)

int64_t grain(int64_t count, int64_t width, int num_threads) {
  MC_REQUIRE(count >= 0 && width >= 0, "sizes must be at least 0, got {} rows of {}", count, width);
  MC_REQUIRE(num_threads >= 1, "num_threads must be at least 1, got {}", num_threads);
  return std::max(int64_t{1}, kGrainNumel / std::max(int64_t{1}, width));
}

// total (width) = the sum over the rows of `sums`.
void add_sums(const std::vector<float>& sums, int64_t width, float* total) {
  std::fill_n(total, width, 0.0F);
  for (size_t i = 0; i < sums.size(); ++i) {
    total[static_cast<int64_t>(i) % width] += sums[i];
  }
}

void check_heads(const HeadShape& shape) {
  MC_REQUIRE(shape.num_tokens >= 0 && shape.num_groups >= 0 && shape.q_per_kv >= 0 &&
                 shape.head_dim >= 0 && shape.num_rotated >= 0,
             "a size is negative");
  MC_REQUIRE(shape.num_tokens == 0 || shape.batch >= 1, "batch must be at least 1, got {}",
             shape.batch);
}

int64_t position_of(const HeadShape& shape, int64_t token) {
  return shape.position_per_sample ? token : token / shape.batch;
}

}  // namespace

template <typename Float>
void rms_norm(const Float* x,
              const Float* added,
              const Float* weight,
              float eps,
              Float* sum,
              Float* y,
              float* scale,
              int64_t rows,
              int64_t width,
              int num_threads) {
  base::parallel_for(rows, grain(rows, width, num_threads), num_threads,
                     [&](int64_t begin, int64_t end) {
                       for (int64_t row = begin; row < end; ++row) {
                         const int64_t at = row * width;
                         if (added != nullptr) {
                           one_sum(x + at, added + at, sum + at, width);
                         }
                         const Float* from = added == nullptr ? x : sum;
                         scale[row] = one_norm(from + at, weight, eps, y + at, width);
                       }
                     });
}

template <typename Float>
void rms_norm_backward(const Float* grad_y,
                       const Float* grad_sum,
                       const Float* x,
                       const Float* weight,
                       const float* scale,
                       Float* grad_x,
                       float* grad_weight,
                       int64_t rows,
                       int64_t width,
                       int num_threads) {
  const int64_t num_sums = (rows + kRowsOfSum - 1) / kRowsOfSum;
  std::vector<float> sums(static_cast<size_t>(grad_weight == nullptr ? 0 : num_sums * width));
  const int64_t at_once = (grain(rows, width, num_threads) + kRowsOfSum - 1) / kRowsOfSum;
  base::parallel_for(num_sums, at_once, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kRowsOfSum; row < std::min(rows, end * kRowsOfSum); ++row) {
      const int64_t at = row * width;
      if (grad_x != nullptr) {
        one_norm_grad(grad_y + at, x + at, weight, scale[row], grad_x + at, width);
        if (grad_sum != nullptr) {
          one_sum(grad_x + at, grad_sum + at, grad_x + at, width);
        }
      }
      if (grad_weight != nullptr) {
        one_weight_grad(grad_y + at, x + at, scale[row], sums.data() + row / kRowsOfSum * width,
                        width);
      }
    }
  });
  if (grad_weight != nullptr) {
    add_sums(sums, width, grad_weight);
  }
}

template <typename Float>
void split_and_rotate(Float* qkv,
                      Float* q,
                      Float* k,
                      Float* v,
                      const float* cos,
                      const float* sin,
                      const HeadShape& shape,
                      bool backward,
                      int num_threads) {
  check_heads(shape);
  const int64_t slots = shape.q_per_kv + 2;
  const int64_t dim = shape.head_dim;
  const int64_t half = shape.num_rotated / 2;
  const auto run_group = [&](int64_t token, int64_t group) {
    const int64_t position = position_of(shape, token);
    const int64_t index = token * shape.num_groups + group;
    for (int64_t slot = 0; slot < slots; ++slot) {
      Float* whole = qkv + (index * slots + slot) * dim;
      Float* part = slot < shape.q_per_kv    ? q + (index * shape.q_per_kv + slot) * dim
                    : slot == shape.q_per_kv ? k + index * dim
                                             : v + index * dim;
      const Float* from = backward ? part : whole;
      Float* to = backward ? whole : part;
      if (slot > shape.q_per_kv) {
        std::copy_n(from, dim, to);
      } else {
        one_rotation(from, to, cos + position * half, sin + position * half, half, dim,
                     backward ? -1.0F : 1.0F);
      }
    }
  };
  const int64_t width = shape.num_groups * slots * dim;
  base::parallel_for(shape.num_tokens, grain(shape.num_tokens, width, num_threads), num_threads,
                     [&](int64_t begin, int64_t end) {
                       for (int64_t token = begin; token < end; ++token) {
                         for (int64_t group = 0; group < shape.num_groups; ++group) {
                           run_group(token, group);
                         }
                       }
                     });
}

template <typename Float>
void norm_and_rotate(const Float* qkv,
                     const HeadNorms<Float>& norms,
                     Float* q,
                     Float* k,
                     Float* v,
                     const float* cos,
                     const float* sin,
                     const HeadShape& shape,
                     int num_threads) {
  check_heads(shape);
  const int64_t slots = shape.q_per_kv + 2;
  const int64_t dim = shape.head_dim;
  const int64_t half = shape.num_rotated / 2;
  const auto run_group = [&](int64_t token, int64_t index, Float* normed) {
    const int64_t at = position_of(shape, token) * half;
    const Float* from = qkv + index * slots * dim;
    float* scale = norms.scale + index * (slots - 1);
    for (int64_t slot = 0; slot <= shape.q_per_kv; ++slot) {
      const bool is_key = slot == shape.q_per_kv;
      scale[slot] = one_norm(from + slot * dim, is_key ? norms.k_weight : norms.q_weight, norms.eps,
                             normed, dim);
      Float* to = is_key ? k + index * dim : q + (index * shape.q_per_kv + slot) * dim;
      one_rotation(normed, to, cos + at, sin + at, half, dim, 1.0F);
    }
    std::copy_n(from + (slots - 1) * dim, dim, v + index * dim);
  };
  const int64_t width = shape.num_groups * slots * dim;
  base::parallel_for(shape.num_tokens, grain(shape.num_tokens, width, num_threads), num_threads,
                     [&](int64_t begin, int64_t end) {
                       std::vector<Float> normed(static_cast<size_t>(dim));
                       for (int64_t i = begin * shape.num_groups; i < end * shape.num_groups; ++i) {
                         run_group(i / shape.num_groups, i, normed.data());
                       }
                     });
}

namespace {

// The gradients of queries or of keys, `per_group` heads of each group from slot `first` on.
template <typename Float>
void norm_and_rotate_part(const Float* grad,
                          const Float* weight,
                          float* grad_weight,
                          int64_t first,
                          int64_t per_group,
                          Float* grad_qkv,
                          const Float* qkv,
                          const HeadNorms<Float>& norms,
                          const float* cos,
                          const float* sin,
                          const HeadShape& shape,
                          int num_threads) {
  const int64_t slots = shape.q_per_kv + 2;
  const int64_t dim = shape.head_dim;
  const int64_t half = shape.num_rotated / 2;
  const int64_t rows = shape.num_tokens * shape.num_groups * per_group;
  const int64_t num_sums = (rows + kRowsOfSum - 1) / kRowsOfSum;
  std::vector<float> sums(static_cast<size_t>(grad_weight == nullptr ? 0 : num_sums * dim));
  const auto run_row = [&](int64_t row, Float* turned) {
    const int64_t index = row / per_group;
    const int64_t slot = first + row % per_group;
    const int64_t position = position_of(shape, index / shape.num_groups) * half;
    one_rotation(grad + row * dim, turned, cos + position, sin + position, half, dim, -1.0F);
    const int64_t at = (index * slots + slot) * dim;
    const float scale = norms.scale[index * (slots - 1) + slot];
    if (grad_qkv != nullptr) {
      one_norm_grad(turned, qkv + at, weight, scale, grad_qkv + at, dim);
    }
    if (grad_weight != nullptr) {
      one_weight_grad(turned, qkv + at, scale, sums.data() + row / kRowsOfSum * dim, dim);
    }
  };
  const int64_t at_once = (grain(rows, dim, num_threads) + kRowsOfSum - 1) / kRowsOfSum;
  base::parallel_for(num_sums, at_once, num_threads, [&](int64_t begin, int64_t end) {
    std::vector<Float> turned(static_cast<size_t>(dim));
    for (int64_t row = begin * kRowsOfSum; row < std::min(rows, end * kRowsOfSum); ++row) {
      run_row(row, turned.data());
    }
  });
  if (grad_weight != nullptr) {
    add_sums(sums, dim, grad_weight);
  }
}

}  // namespace

template <typename Float>
void norm_and_rotate_backward(const HeadGrads<Float>& grads,
                              const Float* qkv,
                              const HeadNorms<Float>& norms,
                              const float* cos,
                              const float* sin,
                              const HeadShape& shape,
                              int num_threads) {
  check_heads(shape);
  const int64_t dim = shape.head_dim;
  norm_and_rotate_part(grads.q, norms.q_weight, grads.q_weight, 0, shape.q_per_kv, grads.qkv, qkv,
                       norms, cos, sin, shape, num_threads);
  norm_and_rotate_part(grads.k, norms.k_weight, grads.k_weight, shape.q_per_kv, 1, grads.qkv, qkv,
                       norms, cos, sin, shape, num_threads);
  if (grads.qkv != nullptr) {
    const int64_t slots = shape.q_per_kv + 2;
    for (int64_t index = 0; index < shape.num_tokens * shape.num_groups; ++index) {
      std::copy_n(grads.v + index * dim, dim, grads.qkv + (index * slots + slots - 1) * dim);
    }
  }
}

#define MC_INSTANTIATE(Float)                                                                      \
  template void rms_norm<Float>(const Float*, const Float*, const Float*, float, Float*, Float*,   \
                                float*, int64_t, int64_t, int);                                    \
  template void rms_norm_backward<Float>(const Float*, const Float*, const Float*, const Float*,   \
                                         const float*, Float*, float*, int64_t, int64_t, int);     \
  template void split_and_rotate<Float>(Float*, Float*, Float*, Float*, const float*,              \
                                        const float*, const HeadShape&, bool, int);                \
  template void norm_and_rotate<Float>(const Float*, const HeadNorms<Float>&, Float*, Float*,      \
                                       Float*, const float*, const float*, const HeadShape&, int); \
  template void norm_and_rotate_backward<Float>(const HeadGrads<Float>&, const Float*,             \
                                                const HeadNorms<Float>&, const float*,             \
                                                const float*, const HeadShape&, int);
MC_INSTANTIATE(float)
MC_INSTANTIATE(uint16_t)

}  // namespace megacore::layers
