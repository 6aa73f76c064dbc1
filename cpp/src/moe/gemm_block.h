// The product of one task: a part of a result, computed by one thread in packed blocks.

#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "gemm_pack.h"
#include "gemm_tile.h"

namespace megacore::moe {

// Columns of the right side that are packed at a time.
inline constexpr int64_t kRightColumns = 256;

// A side of a product in memory: index i is a row of the left side or a column of the right one.
struct Side {
  const char* data;
  int64_t stride;  // elements between two rows of memory
  bool by_depth;   // element (i, d) is data[d * stride + i], otherwise data[i * stride + d]
  int64_t count;   // of i
  const PackKernels* pack;

  const void* at(int64_t i, int64_t d) const {
    return data + (by_depth ? d * stride + i : i * stride + d) * pack->element_bytes;
  }
};

// The result in memory.
struct Result {
  char* data;
  int64_t stride;
  bool turned;  // element (i, j) is data[j * stride + i], otherwise data[i * stride + j]
  bool accumulate;
  NumberFormat format;
  const PackKernels* pack;

  // Whether tiles may be added up in the result itself.
  bool holds_sums() const { return !turned && format == NumberFormat::kFloat32; }
  void* at(int64_t i, int64_t j) const {
    return data + (turned ? j * stride + i : i * stride + j) * pack->element_bytes;
  }
};

// [begin, end) of rows and columns of the result.
struct Part {
  int64_t row_begin;
  int64_t row_end;
  int64_t column_begin;
  int64_t column_end;
};

// Buffers of one thread. Aligned to cache lines, so that no vector of the right side crosses two.
struct alignas(64) Scratch {
  std::array<float, kMaxTileRows * kLeftStride> left;
  alignas(64) std::array<float, kMaxTileDepth * kRightColumns> right;
  alignas(64) std::array<float, kMaxTileRows * kMaxTileColumns> tile;
  std::unique_ptr<float[]> sums;  // sums_size() of the largest part
};

// Numbers that a part needs as Scratch::sums.
int64_t sums_size(const Result& result, const Part& part, int64_t depth);

// Columns and depth of the right side that are packed at a time, and where they are packed in
// memory that several parts share: blocks start at multiples of a tile's columns.
struct RightBlock {
  int64_t column;
  int64_t column_end;
  int64_t depth;  // first
  int64_t count;  // of the depth
  int64_t shared_place;
};

// The blocks of all columns from `begin` to `end`, in the order of multiply_part.
std::vector<RightBlock> right_blocks(int64_t begin, int64_t end, int64_t depth);

// Numbers that the shared memory of a right side has.
int64_t shared_size(int64_t columns, int64_t depth);

void pack_right(const Side& right, const RightBlock& block, float* packed);

// result(i, j) (+)= sum over d < depth of left(i, d) right(j, d), for a part of the result.
// `shared` has the packed blocks of the right side; if it is null, the part packs its own.
void multiply_part(const Side& left,
                   const Side& right,
                   const Result& result,
                   const Part& part,
                   int64_t depth,
                   const float* shared,
                   Scratch& scratch);

}  // namespace megacore::moe
