// Packing of the two sides of a matrix product for the tiles of gemm_tile.h, and rounding of their
// sums: elements of any format become fp32 on the way in, and fp32 becomes the result's format.

#pragma once

#include <cstdint>

#include "megacore/moe/grouped_gemm.h"

namespace megacore::moe {

// Functions for elements of one format, which `source` and `target` point to.
struct PackKernels {
  int64_t element_bytes;

  // left[i * kLeftStride + d] = source[i * stride + d] for i < rows, d < depth.
  void (*left_by_rows)(
      const void* source, int64_t stride, int64_t rows, int64_t depth, float* left);

  // left[d * max_rows + i] = source[d * stride + i] for i < rows, d < depth; what is behind `rows`
  // may have any value. REQUIRES: `readable` >= rows elements of each row of the source exist.
  void (*left_by_depth)(const void* source,
                        int64_t stride,
                        int64_t rows,
                        int64_t depth,
                        int64_t readable,
                        float* left);

  // right[d * width + j] = source[d * stride + j] for d < depth, j < used, and zero for j >= used.
  void (*right_by_depth)(
      const void* source, int64_t stride, int64_t used, int64_t width, int64_t depth, float* right);

  // right[d * width + j] = source[j * stride + d] for d < depth, j < used, and zero for j >= used.
  void (*right_by_columns)(
      const void* source, int64_t stride, int64_t used, int64_t width, int64_t depth, float* right);

  // target[i * stride + j] = sums[i * sums_stride + j] for i < rows, j < columns.
  void (*round_rows)(const float* sums,
                     int64_t sums_stride,
                     int64_t rows,
                     int64_t columns,
                     void* target,
                     int64_t stride);

  // target[j * stride + i] = sums[i * sums_stride + j] for i < rows, j < columns.
  void (*round_columns)(const float* sums,
                        int64_t sums_stride,
                        int64_t rows,
                        int64_t columns,
                        void* target,
                        int64_t stride);
};

// The functions of this processor whose tiles tile_kernels() returns.
const PackKernels& pack_kernels(NumberFormat format);

}  // namespace megacore::moe
