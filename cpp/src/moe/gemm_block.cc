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
  return {.first = first, .used = used, .width = kernels.panel_width(used)};
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

std::vector<RightBlock> right_blocks(int64_t begin, int64_t end, int64_t depth) {
  const TileKernels& kernels = tile_kernels();
  std::vector<RightBlock> blocks;
  for (int64_t column = begin; column < end; column += kRightColumns) {
    const int64_t column_end = std::min(end, column + kRightColumns);
    const int64_t width = base::align_up(column_end - column, kernels.columns);
    for (int64_t d = 0; d < depth; d += kernels.depth) {
      blocks.push_back({.column = column,
                        .column_end = column_end,
                        .depth = d,
                        .count = std::min(kernels.depth, depth - d),
                        .shared_place = column * depth + d * width});
    }
  }
  return blocks;
}

int64_t shared_size(int64_t columns, int64_t depth) {
  return base::align_up(columns, tile_kernels().columns) * depth;
}

void pack_right(const Side& right, const RightBlock& block, float* packed) {
  const TileKernels& kernels = tile_kernels();
  for (int64_t at = block.column; at < block.column_end; at += kernels.columns) {
    pack_panel(right, panel_at(kernels, at, block.column_end), block.depth, block.count,
               packed + (at - block.column) * block.count);
  }
}

void multiply_part(const Side& left,
                   const Side& right,
                   const Result& result,
                   const Part& part,
                   int64_t depth,
                   const float* shared,
                   Scratch& scratch) {
  const TileKernels& kernels = tile_kernels();
  const TileFunctions& functions = left.by_depth ? kernels.by_depth : kernels.by_rows;
  const bool is_direct = result.holds_sums();
  const bool keeps_all = depth > kernels.depth;
  const auto round = result.turned ? result.pack->round_columns : result.pack->round_rows;
  const int64_t narrow_stride = sums_stride(part.column_end - part.column_begin);
  for (const RightBlock& block : right_blocks(part.column_begin, part.column_end, depth)) {
    if (shared == nullptr) {
      pack_right(right, block, scratch.right.data());
    }
    const float* packed = shared == nullptr ? scratch.right.data() : shared + block.shared_place;
    for (int64_t row = part.row_begin; row < part.row_end; row += kernels.max_rows) {
      const int64_t rows = std::min(kernels.max_rows, part.row_end - row);
      pack_strip(left, row, rows, block.depth, block.count, scratch.left.data());
      float* sums =
          is_direct ? static_cast<float*>(result.at(row, block.column))
                    : scratch.sums.get() + (keeps_all ? (row - part.row_begin) * narrow_stride : 0);
      const int64_t stride = is_direct ? result.stride : narrow_stride;
      const bool accumulate = block.depth > 0 || (is_direct && result.accumulate);
      for (int64_t at = block.column; at < block.column_end; at += kernels.columns) {
        const Panel panel = panel_at(kernels, at, block.column_end);
        const auto& of_width = panel.width == kernels.columns ? functions.whole : functions.half;
        const int64_t place = at - block.column;
        multiply_into(of_width[rows - 1], scratch, packed + place * block.count, panel, rows,
                      block.count, sums + place, stride, accumulate);
      }
      if (!is_direct && block.depth + block.count == depth) {
        round(sums, stride, rows, block.column_end - block.column, result.at(row, block.column),
              result.stride);
      }
    }
  }
}

}  // namespace megacore::moe
