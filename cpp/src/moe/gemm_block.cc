#include "gemm_block.h"

#include <algorithm>

#include "megacore/base/intmath.h"

namespace megacore::moe {
namespace {

// A panel is a set of neighbouring columns of the right side, packed as (depth, width).
struct Panel {
  int64_t first;  // column
  int64_t used;   // columns that exist; the rest of the width is zero
  int64_t width;  // that of a whole tile or of half of one
};

Panel panel_at(const TileKernels& kernels, int64_t first, int64_t end) {
  const int64_t used = std::min(kernels.columns, end - first);
  const bool is_half = used * 2 <= kernels.columns;
  return {.first = first, .used = used, .width = is_half ? kernels.columns / 2 : kernels.columns};
}

void pack_panel(const Side& right, const Panel& panel, int64_t d, int64_t depth, float* packed) {
  const auto pack = right.by_depth ? right.pack->right_by_depth : right.pack->right_by_columns;
  pack(right.at(panel.first, d), right.stride, panel.used, panel.width, depth, packed);
}

void pack_strip(
    const Side& left, int64_t row, int64_t rows, int64_t d, int64_t depth, float* packed) {
  if (left.by_depth) {
    left.pack->left_by_depth(left.at(row, d), left.stride, rows, depth, left.count - row, packed);
  } else {
    left.pack->left_by_rows(left.at(row, d), left.stride, rows, depth, packed);
  }
}

// Multiplies packed sides into rows of c, which start at the panel.
void multiply_into(TileFunction function,
                   Scratch& scratch,
                   const float* right,
                   const Panel& panel,
                   int64_t rows,
                   int64_t depth,
                   float* c,
                   int64_t c_stride,
                   bool accumulate) {
  if (panel.used == panel.width) {
    function(scratch.left.data(), right, depth, c, c_stride, accumulate);
    return;
  }
  float* tile = scratch.tile.data();
  function(scratch.left.data(), right, depth, tile, panel.width, false);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < panel.used; ++j) {
      float& target = c[i * c_stride + j];
      target = accumulate ? target + tile[i * panel.width + j] : tile[i * panel.width + j];
    }
  }
}

// Distance of rows in Scratch::sums, for columns that are packed at a time.
int64_t sums_stride(int64_t columns) {
  return base::align_up(std::min(columns, kRightColumns), kMaxTileColumns);
}

}  // namespace

int64_t sums_size(const Result& result, const Part& part, int64_t depth) {
  if (result.holds_sums()) {
    return 0;
  }
  const int64_t stride = sums_stride(part.column_end - part.column_begin);
  const int64_t rows = depth > tile_kernels().depth ? part.row_end - part.row_begin : kMaxTileRows;
  return rows * stride;
}

void multiply_part(const Side& left,
                   const Side& right,
                   const Result& result,
                   const Part& part,
                   int64_t depth,
                   Scratch& scratch) {
  const TileKernels& kernels = tile_kernels();
  const TileFunctions& functions = left.by_depth ? kernels.by_depth : kernels.by_rows;
  const bool is_direct = result.holds_sums();
  const bool keeps_all = depth > kernels.depth;
  const auto round = result.turned ? result.pack->round_columns : result.pack->round_rows;
  const int64_t narrow_stride = sums_stride(part.column_end - part.column_begin);
  for (int64_t column = part.column_begin; column < part.column_end; column += kRightColumns) {
    const int64_t column_end = std::min(part.column_end, column + kRightColumns);
    for (int64_t d = 0; d < depth; d += kernels.depth) {
      const int64_t count = std::min(kernels.depth, depth - d);
      for (int64_t at = column; at < column_end; at += kernels.columns) {
        pack_panel(right, panel_at(kernels, at, column_end), d, count,
                   scratch.right.data() + (at - column) * count);
      }
      for (int64_t row = part.row_begin; row < part.row_end; row += kernels.max_rows) {
        const int64_t rows = std::min(kernels.max_rows, part.row_end - row);
        pack_strip(left, row, rows, d, count, scratch.left.data());
        float* sums = is_direct ? static_cast<float*>(result.at(row, column))
                                : scratch.sums.get() +
                                      (keeps_all ? (row - part.row_begin) * narrow_stride : 0);
        const int64_t stride = is_direct ? result.stride : narrow_stride;
        const bool accumulate = d > 0 || (is_direct && result.accumulate);
        for (int64_t at = column; at < column_end; at += kernels.columns) {
          const Panel panel = panel_at(kernels, at, column_end);
          const bool is_whole = panel.width == kernels.columns;
          multiply_into((is_whole ? functions.whole : functions.half)[rows - 1], scratch,
                        scratch.right.data() + (at - column) * count, panel, rows, count,
                        sums + (at - column), stride, accumulate);
        }
        if (!is_direct && d + count == depth) {
          round(sums, stride, rows, column_end - column, result.at(row, column), result.stride);
        }
      }
    }
  }
}

}  // namespace megacore::moe
