#include "megacore/moe/fp8.h"

#include <algorithm>
#include <array>
#include <vector>

#include "megacore/base/check.h"
#include "megacore/base/parallel_for.h"
#include "megacore/base/vector_clones.h"

namespace megacore::moe {
namespace {

constexpr int64_t kBlock = kScaleBlock;
// Elements of work that are worth a thread.
constexpr int64_t kGrainNumel = 1 << 15;

using base::widen;

[[gnu::always_inline]] inline uint32_t magnitude_bits(float value) {
  return base::bits_of_float(value) & 0x7fffffffU;
}

template <typename Float>
MC_VECTOR_CLONES_V4 uint32_t largest_of(const Float* __restrict__ x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, magnitude_bits(widen(x[i])));
  }
  return largest;
}

template <typename Float>
MC_VECTOR_CLONES_V4 void raise_each(const Float* __restrict__ x,
                                    uint32_t* __restrict__ largest,
                                    int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    largest[i] = std::max(largest[i], magnitude_bits(widen(x[i])));
  }
}

template <typename Float>
MC_VECTOR_CLONES_V4 void round_by_one(const Float* __restrict__ x,
                                      float scale,
                                      uint8_t* __restrict__ values,
                                      int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    values[i] = base::float8_bits(widen(x[i]) / scale);
  }
}

template <typename Float>
MC_VECTOR_CLONES_V4 void round_by_each(const Float* __restrict__ x,
                                       const float* __restrict__ scales,
                                       uint8_t* __restrict__ values,
                                       int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    values[i] = base::float8_bits(widen(x[i]) / scales[i]);
  }
}

void require_fp8_sizes(int64_t rows, int64_t width, int num_threads) {
  MC_REQUIRE(rows >= 0 && width >= 0, "sizes must be at least 0, got {} rows of {}", rows, width);
  MC_REQUIRE(num_threads >= 1, "num_threads must be at least 1, got {}", num_threads);
}

// A block of at most 128 x 128 rounded values, written to a matrix or to its transpose.
struct RoundedTile {
  std::array<uint8_t, static_cast<size_t>(kBlock* kBlock)> values;

  uint8_t* row(int64_t index) { return values.data() + index * kBlock; }

  void write_transposed(uint8_t* to, int64_t stride, int64_t height, int64_t width) {
    for (int64_t column = 0; column < width; ++column) {
      for (int64_t i = 0; i < height; ++i) {
        to[column * stride + i] = row(i)[column];
      }
    }
  }
};

// Rows of one expert with one scale per column.
struct RowBlock {
  int64_t start;   // first row
  int64_t count;   // rows, at most 128
  int64_t index;   // of the block among all
  int64_t first;   // block of the expert
  int64_t blocks;  // of the expert
};

std::vector<RowBlock> row_blocks_of(const ExpertRows& shape) {
  std::vector<RowBlock> blocks;
  int64_t end = 0;
  for (int64_t expert = 0; expert < shape.num_experts; ++expert) {
    const int64_t count = usable_count_of(shape.m_splits, expert, shape.rows);
    end += count;
    const GroupRows rows = rows_of_group(end, count, shape.rows);
    const int64_t first = first_block_of(rows.start, expert);
    for (int64_t i = 0; i < scale_blocks(rows.count); ++i) {
      blocks.push_back({.start = rows.start + i * kBlock,
                        .count = std::min(kBlock, rows.count - i * kBlock),
                        .index = first + i,
                        .first = first,
                        .blocks = scale_blocks(rows.count)});
    }
  }
  return blocks;
}

// Columns [column, column + width) of a block of rows, at most 128.
template <typename Float>
void quantize_columns_of(const Float* x,
                         uint8_t* values,
                         float* scales,
                         const RowBlock& block,
                         int64_t column,
                         int64_t width,
                         int64_t stride,
                         bool transposed) {
  const Float* from = x + block.start * stride + column;
  std::array<uint32_t, static_cast<size_t>(kBlock)> largest{};
  for (int64_t i = 0; i < block.count; ++i) {
    raise_each(from + i * stride, largest.data(), width);
  }
  float* own_scales = scales + block.index * stride + column;
  std::transform(largest.begin(), largest.begin() + width, own_scales, scale_of);
  RoundedTile tile{};
  for (int64_t i = 0; i < block.count; ++i) {
    uint8_t* to = transposed ? tile.row(i) : values + (block.start + i) * stride + column;
    round_by_each(from + i * stride, own_scales, to, width);
  }
  if (transposed) {
    const int64_t depth = block.blocks * kBlock;
    uint8_t* expert = values + block.first * kBlock * stride + column * depth;
    tile.write_transposed(expert + (block.index - block.first) * kBlock, depth, kBlock, width);
  }
}

}  // namespace

template <typename Float>
void quantize_rows(const Float* x,
                   uint8_t* values,
                   float* scales,
                   const int64_t* num_rows,
                   int64_t rows,
                   int64_t width,
                   int num_threads) {
  require_fp8_sizes(rows, width, num_threads);
  const int64_t used = num_rows == nullptr ? rows : usable_count(*num_rows, rows);
  const int64_t blocks = scale_blocks(width);
  const int64_t grain = std::max(int64_t{1}, kGrainNumel / std::max(int64_t{1}, width));
  base::parallel_for(used, grain, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t at = row * width + block * kBlock;
        const int64_t count = std::min(kBlock, width - block * kBlock);
        const float scale = scale_of(largest_of(x + at, count));
        scales[row * blocks + block] = scale;
        round_by_one(x + at, scale, values + at, count);
      }
    }
  });
}

template <typename Float>
void quantize_columns(const Float* x,
                      uint8_t* values,
                      float* scales,
                      const ExpertRows& shape,
                      bool transposed,
                      int num_threads) {
  require_fp8_sizes(shape.rows, shape.width, num_threads);
  MC_REQUIRE(shape.m_splits != nullptr || shape.num_experts == 1, "{} experts need m_splits",
             shape.num_experts);
  const std::vector<RowBlock> blocks = row_blocks_of(shape);
  const int64_t chunks = scale_blocks(shape.width);
  const auto count = static_cast<int64_t>(blocks.size()) * chunks;
  base::parallel_for(count, 2, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t column = i % chunks * kBlock;
      quantize_columns_of(x, values, scales, blocks[static_cast<size_t>(i / chunks)], column,
                          std::min(kBlock, shape.width - column), shape.width, transposed);
    }
  });
}

template <typename Float>
void quantize_blocks(const Float* w,
                     uint8_t* values,
                     float* scales,
                     int64_t num,
                     int64_t height,
                     int64_t width,
                     bool transposed,
                     int num_threads) {
  require_fp8_sizes(num * height, width, num_threads);
  const int64_t down = scale_blocks(height), across = scale_blocks(width);
  base::parallel_for(num * down * across, 2, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t matrix = i / (down * across);
      const int64_t y = i / across % down, x = i % across;
      const int64_t rows = std::min(kBlock, height - y * kBlock);
      const int64_t columns = std::min(kBlock, width - x * kBlock);
      const int64_t at = matrix * height * width;
      const Float* from = w + at + y * kBlock * width + x * kBlock;
      uint32_t largest = 0;
      for (int64_t row = 0; row < rows; ++row) {
        largest = std::max(largest, largest_of(from + row * width, columns));
      }
      const float scale = scale_of(largest);
      scales[matrix * down * across + (transposed ? x * down + y : y * across + x)] = scale;
      RoundedTile tile;
      uint8_t* same = values + at + y * kBlock * width + x * kBlock;
      for (int64_t row = 0; row < rows; ++row) {
        round_by_one(from + row * width, scale, transposed ? tile.row(row) : same + row * width,
                     columns);
      }
      if (transposed) {
        tile.write_transposed(values + at + x * kBlock * height + y * kBlock, height, rows,
                              columns);
      }
    }
  });
}

#define MC_QUANTIZE(Float)                                                                       \
  template void quantize_rows(const Float*, uint8_t*, float*, const int64_t*, int64_t, int64_t,  \
                              int);                                                              \
  template void quantize_columns(const Float*, uint8_t*, float*, const ExpertRows&, bool, int);  \
  template void quantize_blocks(const Float*, uint8_t*, float*, int64_t, int64_t, int64_t, bool, \
                                int);
MC_QUANTIZE(float)
MC_QUANTIZE(uint16_t)

}  // namespace megacore::moe
