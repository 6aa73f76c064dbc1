// Rounding to 8-bit floats (e4m3) with a float32 scale per block: a value times its scale is near
// the element. The scale of a block is its largest magnitude / 448, and never 0. A block with a NaN
// or an infinity becomes NaN, times its scale.
//
// Float is float, or uint16_t for the bits of bfloat16. The kernels in cuda/kernels/fp8.cu give the
// same bits.

#pragma once

#include <cstdint>

#include "megacore/base/host_device.h"
#include "megacore/base/low_precision.h"
#include "megacore/moe/grouped_arguments.h"

namespace megacore::moe {

// The scale of a block, from the largest of its bits without signs. These have the order of the
// magnitudes, and a NaN is larger than every number. The product in double precision rounds to the
// quotient of floats, which is never near the middle of two of them, and needs no division.
MC_HOST_DEVICE float scale_of(uint32_t largest) {
  const double magnitude = static_cast<double>(base::float_of_bits(largest));
  const auto scale = static_cast<float>(magnitude * (1.0 / 448.0));
  return scale < 0x1p-126F ? 0x1p-126F : scale;
}

// Blocks of 128 elements of a row.
//
// x          (rows, width)
// values     (rows, width) written
// scales     (rows, ceil(width / 128)) written
// num_rows   optional: rows in use; the others are neither read nor written
template <typename Float>
void quantize_rows(const Float* x,
                   uint8_t* values,
                   float* scales,
                   const int64_t* num_rows,
                   int64_t rows,
                   int64_t width,
                   int num_threads);

// Rows of experts, one after the other.
struct ExpertRows {
  const int64_t* m_splits;  // (E) rows per expert; null for one expert with all rows
  int64_t rows;             // of all experts and of none
  int64_t num_experts;
  int64_t width;
};

// Blocks of 128 elements of a column, all of one expert; the last of an expert has fewer. Block
// i of an expert is block first_block_of(its first row, expert) + i of row_blocks(rows, E).
//
// x        (rows, width); rows of no expert are neither read nor written
// values   (rows, width) written; transposed: for each expert (width, 128 times its blocks), zero
//          beyond its rows, from element 128 width times its first block
// scales   (row_blocks(rows, E), width); those of blocks in use are written
template <typename Float>
void quantize_columns(const Float* x,
                      uint8_t* values,
                      float* scales,
                      const ExpertRows& shape,
                      bool transposed,
                      int num_threads);

// Blocks of 128 x 128 elements of each matrix.
//
// w        (num, height, width)
// values   (num, height, width) written; transposed: (num, width, height)
// scales   (num, ceil(height / 128), ceil(width / 128)) written, or transposed in the same way
template <typename Float>
void quantize_blocks(const Float* w,
                     uint8_t* values,
                     float* scales,
                     int64_t num,
                     int64_t height,
                     int64_t width,
                     bool transposed,
                     int num_threads);

}  // namespace megacore::moe
