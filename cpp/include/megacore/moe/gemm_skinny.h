// Matrix products with a handful of rows on one side: bound by reading the weight once.

#pragma once

#include <cstdint>

namespace megacore::moe {

// Groups up to this size take these kernels; above it, packing the weight pays.
inline constexpr int64_t kSkinnyRows = 8;

struct SkinnyKernels {
  // y[i * y_stride + n] = x[i] . w[n] for i < rows, n < features; x and w have rows of `depth`.
  void (*forward)(const float* x,
                  const float* w,
                  float* y,
                  int64_t rows,
                  int64_t features,
                  int64_t depth,
                  int64_t y_stride);

  // out[i][k] = sum over n < depth of grad[i * grad_stride + n] * w[n][k] for i < rows, k <
  // columns; w and out have rows of `stride`.
  void (*input_grad)(const float* grad,
                     const float* w,
                     float* out,
                     int64_t rows,
                     int64_t depth,
                     int64_t columns,
                     int64_t grad_stride,
                     int64_t stride);
};

// The widest kernels that this processor runs.
const SkinnyKernels& skinny_kernels();

}  // namespace megacore::moe
