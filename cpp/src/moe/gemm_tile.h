// The innermost loop of a matrix product: one tile of the result, kept in registers.

#pragma once

#include <cstdint>

namespace megacore::moe {

// Largest depth of packed blocks. A row of the packed left side is a little longer, as rows a power
// of two apart would compete for the same lines of the cache.
inline constexpr int64_t kMaxTileDepth = 512;
inline constexpr int64_t kLeftStride = kMaxTileDepth + 16;

// The widest and tallest tile of any processor, for buffers.
inline constexpr int64_t kMaxTileRows = 14;
inline constexpr int64_t kMaxTileColumns = 32;

// c[i][j] (+)= sum over d < depth of left(i, d) * right[d][j], for i < rows, j < columns.
// left(i, d) is left[i * kLeftStride + d], or left[d * max_rows + i] where it is packed by depth;
// `right` has rows of `columns`, `c` rows of `c_stride`.
using TileFunction = void (*)(const float* left,
                              const float* right,
                              int64_t depth,
                              float* c,
                              int64_t c_stride,
                              bool accumulate);

struct TileFunctions {
  TileFunction whole[kMaxTileRows];  // [rows - 1]
  TileFunction half[kMaxTileRows];
};

struct TileKernels {
  int64_t max_rows;
  int64_t columns;  // of a whole tile; half of it may be used too
  int64_t depth;    // of packed blocks
  TileFunctions by_rows;
  TileFunctions by_depth;

  // Width of the tiles that compute `used` <= columns.
  int64_t panel_width(int64_t used) const { return used * 2 <= columns ? columns / 2 : columns; }
};

// The widest kernels that this processor runs.
const TileKernels& tile_kernels();

}  // namespace megacore::moe
