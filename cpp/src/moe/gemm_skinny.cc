#include "megacore/moe/gemm_skinny.h"

#include <algorithm>
#include <cstring>

#include "megacore/base/vector_clones.h"

namespace megacore::moe {
namespace {

using Float4 [[gnu::vector_size(16)]] = float;
using Float8 [[gnu::vector_size(32)]] = float;
using Float16 [[gnu::vector_size(64)]] = float;

// Rows of the weight that are read side by side; columns of a result that stay in the cache.
constexpr int64_t kWeightRows = 4;
constexpr int64_t kGradRows = 8;
constexpr int64_t kGradColumns = 1024;

// By reference: a vector that the baseline lacks cannot be returned.
template <typename Vector>
[[gnu::always_inline]] inline void load(Vector& value, const float* from) {
  memcpy(&value, from, sizeof(Vector));
}

// kRows x kWeights dot products at once.
template <typename Vector, int kRows, int kWeights>
[[gnu::always_inline]] inline void dots(
    const float* x, const float* w, float* y, int64_t depth, int64_t y_stride) {
  constexpr int64_t kLanes = sizeof(Vector) / sizeof(float);
  Vector sums[kRows][kWeights] = {};
  int64_t d = 0;
  for (; d + kLanes <= depth; d += kLanes) {
    Vector weights[kWeights];
#pragma GCC unroll 4
    for (int j = 0; j < kWeights; ++j) {
      load(weights[j], w + j * depth + d);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      Vector row;
      load(row, x + i * depth + d);
#pragma GCC unroll 4
      for (int j = 0; j < kWeights; ++j) {
        sums[i][j] += row * weights[j];
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kWeights; ++j) {
      float sum = 0.0F;
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        sum += sums[i][j][lane];
      }
      for (int64_t at = d; at < depth; ++at) {
        sum += x[i * depth + at] * w[j * depth + at];
      }
      y[i * y_stride + j] = sum;
    }
  }
}

template <typename Vector, int kWeights>
[[gnu::always_inline]] inline void all_dots(
    const float* x, const float* w, float* y, int64_t rows, int64_t depth, int64_t y_stride) {
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) {
    dots<Vector, 4, kWeights>(x + i * depth, w, y + i * y_stride, depth, y_stride);
  }
  x += i * depth;
  y += i * y_stride;
  switch (rows - i) {
    case 1:
      return dots<Vector, 1, kWeights>(x, w, y, depth, y_stride);
    case 2:
      return dots<Vector, 2, kWeights>(x, w, y, depth, y_stride);
    case 3:
      return dots<Vector, 3, kWeights>(x, w, y, depth, y_stride);
    default:
      return;
  }
}

template <typename Vector>
[[gnu::always_inline]] inline void forward(const float* x,
                                           const float* w,
                                           float* y,
                                           int64_t rows,
                                           int64_t features,
                                           int64_t depth,
                                           int64_t y_stride) {
  int64_t n = 0;
  for (; n + kWeightRows <= features; n += kWeightRows) {
    all_dots<Vector, kWeightRows>(x, w + n * depth, y + n, rows, depth, y_stride);
  }
  for (; n < features; ++n) {
    all_dots<Vector, 1>(x, w + n * depth, y + n, rows, depth, y_stride);
  }
}

// out[i][k] (+)= sum over j < kCount of factors[j][i] * w[j][k]. A column of the weight is read
// once.
template <typename Vector, int kCount>
[[gnu::always_inline]] inline void add_rows(const float (*factors)[kSkinnyRows],
                                            const float* w,
                                            float* out,
                                            int64_t rows,
                                            int64_t columns,
                                            int64_t stride,
                                            bool accumulate) {
  constexpr int64_t kLanes = sizeof(Vector) / sizeof(float);
  int64_t k = 0;
  for (; k + kLanes <= columns; k += kLanes) {
    Vector weights[kCount];
#pragma GCC unroll 8
    for (int j = 0; j < kCount; ++j) {
      load(weights[j], w + j * stride + k);
    }
    for (int64_t i = 0; i < rows; ++i) {
      float* target = out + i * stride + k;
      Vector sum = {};
      if (accumulate) {
        load(sum, target);
      }
#pragma GCC unroll 8
      for (int j = 0; j < kCount; ++j) {
        sum += weights[j] * factors[j][i];
      }
      memcpy(target, &sum, sizeof(Vector));
    }
  }
  for (; k < columns; ++k) {
    for (int64_t i = 0; i < rows; ++i) {
      float sum = accumulate ? out[i * stride + k] : 0.0F;
      for (int j = 0; j < kCount; ++j) {
        sum += w[j * stride + k] * factors[j][i];
      }
      out[i * stride + k] = sum;
    }
  }
}

template <typename Vector>
[[gnu::always_inline]] inline void input_grad(const float* grad,
                                              const float* w,
                                              float* out,
                                              int64_t rows,
                                              int64_t depth,
                                              int64_t columns,
                                              int64_t grad_stride,
                                              int64_t stride) {
  for (int64_t k = 0; k < columns; k += kGradColumns) {
    const int64_t width = std::min(kGradColumns, columns - k);
    int64_t n = 0;
    while (n < depth) {
      const int64_t count = n + kGradRows <= depth ? kGradRows : 1;
      float factors[kGradRows][kSkinnyRows];
      for (int64_t j = 0; j < count; ++j) {
        for (int64_t i = 0; i < rows; ++i) {
          factors[j][i] = grad[i * grad_stride + n + j];
        }
      }
      if (count == kGradRows) {
        add_rows<Vector, kGradRows>(factors, w + n * stride + k, out + k, rows, width, stride,
                                    n > 0);
      } else {
        add_rows<Vector, 1>(factors, w + n * stride + k, out + k, rows, width, stride, n > 0);
      }
      n += count;
    }
  }
}

// One plain function per instruction set, since only functions carry a target.
#define MC_SKINNY_KERNELS(suffix, Vector, target)                                              \
  target void forward_##suffix(const float* x, const float* w, float* y, int64_t rows,         \
                               int64_t features, int64_t depth, int64_t y_stride) {            \
    forward<Vector>(x, w, y, rows, features, depth, y_stride);                                 \
  }                                                                                            \
  target void input_grad_##suffix(const float* grad, const float* w, float* out, int64_t rows, \
                                  int64_t depth, int64_t columns, int64_t grad_stride,         \
                                  int64_t stride) {                                            \
    input_grad<Vector>(grad, w, out, rows, depth, columns, grad_stride, stride);               \
  }                                                                                            \
  constexpr SkinnyKernels k##suffix = {forward_##suffix, input_grad_##suffix};

MC_SKINNY_KERNELS(Baseline, Float4, )
#if defined(__x86_64__)
MC_SKINNY_KERNELS(Avx2, Float8, [[gnu::target("avx2,fma")]])
MC_SKINNY_KERNELS(Avx512, Float16, [[gnu::target("avx512f")]])
#endif

}  // namespace

const SkinnyKernels& skinny_kernels() {
#if defined(__x86_64__)
  switch (base::vector_bits()) {
    case 512:
      return kAvx512;
    case 256:
      return kAvx2;
    default:
      break;
  }
#endif
  return kBaseline;
}

}  // namespace megacore::moe
