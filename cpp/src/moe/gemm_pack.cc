#include "gemm_pack.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "gemm_tile.h"
#include "megacore/base/low_precision.h"

namespace megacore::moe {
namespace {

using base::BFloat16;
using base::Float16;
using base::Plain;

using Float4 [[gnu::vector_size(16)]] = float;

#if defined(__clang__)
#define MC_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
using Int4 [[gnu::vector_size(16)]] = int32_t;
#define MC_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Int4{__VA_ARGS__})
#endif

// Depth of a stage: rows that are widened before they are transposed.
constexpr int64_t kStageDepth = 64;

template <typename Type>
using Stored = typename Type::Stored;

template <typename Type>
[[gnu::always_inline]] inline void widen_row(const Stored<Type>* __restrict__ from,
                                             int64_t count,
                                             float* __restrict__ to) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = Type::widen(from[i]);
  }
}

template <typename Type>
[[gnu::always_inline]] inline void left_by_rows(
    const void* source, int64_t stride, int64_t rows, int64_t depth, float* left) {
  const auto* from = static_cast<const Stored<Type>*>(source);
  for (int64_t i = 0; i < rows; ++i) {
    widen_row<Type>(from + i * stride, depth, left + i * kLeftStride);
  }
}

// With kRows elements of a row in kPadded lanes, the surplus is overwritten by the next row.
template <typename Type, int kRows, int kPadded>
[[gnu::always_inline]] inline void left_by_depth(const void* source,
                                                 int64_t stride,
                                                 int64_t rows,
                                                 int64_t depth,
                                                 int64_t readable,
                                                 float* __restrict__ left) {
  const auto* __restrict__ from = static_cast<const Stored<Type>*>(source);
  if (readable >= kPadded) {
    for (int64_t d = 0; d < depth; ++d) {
      for (int i = 0; i < kPadded; ++i) {
        left[d * kRows + i] = Type::widen(from[d * stride + i]);
      }
    }
    return;
  }
  for (int64_t d = 0; d < depth; ++d) {
    widen_row<Type>(from + d * stride, rows, left + d * kRows);
  }
}

template <typename Type, int kWidth>
[[gnu::always_inline]] inline void full_rows(const Stored<Type>* __restrict__ from,
                                             int64_t stride,
                                             int64_t depth,
                                             float* __restrict__ right) {
  for (int64_t d = 0; d < depth; ++d) {
    for (int j = 0; j < kWidth; ++j) {
      right[d * kWidth + j] = Type::widen(from[d * stride + j]);
    }
  }
}

template <typename Type, int kColumns>
[[gnu::always_inline]] inline void right_by_depth(
    const void* source, int64_t stride, int64_t used, int64_t width, int64_t depth, float* right) {
  const auto* from = static_cast<const Stored<Type>*>(source);
  if (used == kColumns) {
    full_rows<Type, kColumns>(from, stride, depth, right);
    return;
  }
  for (int64_t d = 0; d < depth; ++d) {
    widen_row<Type>(from + d * stride, used, right + d * width);
    std::fill(right + d * width + used, right + (d + 1) * width, 0.0F);
  }
}

// to[d * to_stride + j] = from[j * stride + d] for d, j < 4.
[[gnu::always_inline]] inline void transpose_square(const float* from,
                                                    int64_t stride,
                                                    float* to,
                                                    int64_t to_stride) {
  Float4 rows[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    memcpy(&rows[j], from + j * stride, sizeof(Float4));
  }
  const Float4 low01 = MC_SHUFFLE(rows[0], rows[1], 0, 4, 1, 5);
  const Float4 high01 = MC_SHUFFLE(rows[0], rows[1], 2, 6, 3, 7);
  const Float4 low23 = MC_SHUFFLE(rows[2], rows[3], 0, 4, 1, 5);
  const Float4 high23 = MC_SHUFFLE(rows[2], rows[3], 2, 6, 3, 7);
  const Float4 turned[4] = {
      MC_SHUFFLE(low01, low23, 0, 1, 4, 5), MC_SHUFFLE(low01, low23, 2, 3, 6, 7),
      MC_SHUFFLE(high01, high23, 0, 1, 4, 5), MC_SHUFFLE(high01, high23, 2, 3, 6, 7)};
#pragma GCC unroll 4
  for (int d = 0; d < 4; ++d) {
    memcpy(to + d * to_stride, &turned[d], sizeof(Float4));
  }
}

// to[d * to_stride + j] = from[j * stride + d] for d < depth, j < count.
[[gnu::always_inline]] inline void transpose(
    const float* from, int64_t stride, int64_t count, int64_t depth, float* to, int64_t to_stride) {
  const int64_t whole = depth / 4 * 4;
  int64_t j = 0;
  for (; j + 4 <= count; j += 4) {
    for (int64_t d = 0; d < whole; d += 4) {
      transpose_square(from + j * stride + d, stride, to + d * to_stride + j, to_stride);
    }
    for (int64_t d = whole; d < depth; ++d) {
      for (int64_t at = j; at < j + 4; ++at) {
        to[d * to_stride + at] = from[at * stride + d];
      }
    }
  }
  for (; j < count; ++j) {
    for (int64_t d = 0; d < depth; ++d) {
      to[d * to_stride + j] = from[j * stride + d];
    }
  }
}

template <typename Type>
[[gnu::always_inline]] inline void right_by_columns(
    const void* source, int64_t stride, int64_t used, int64_t width, int64_t depth, float* right) {
  const auto* from = static_cast<const Stored<Type>*>(source);
  std::array<float, kMaxTileColumns * kStageDepth> stage;
  for (int64_t d = 0; d < depth; d += kStageDepth) {
    const int64_t count = std::min(kStageDepth, depth - d);
    if constexpr (std::is_same_v<Stored<Type>, float>) {
      transpose(from + d, stride, used, count, right + d * width, width);
    } else {
      for (int64_t j = 0; j < used; ++j) {
        widen_row<Type>(from + j * stride + d, count, stage.data() + j * kStageDepth);
      }
      transpose(stage.data(), kStageDepth, used, count, right + d * width, width);
    }
  }
  for (int64_t d = 0; d < depth && used < width; ++d) {
    std::fill(right + d * width + used, right + (d + 1) * width, 0.0F);
  }
}

template <typename Type>
[[gnu::always_inline]] inline void round_rows(const float* __restrict__ sums,
                                              int64_t sums_stride,
                                              int64_t rows,
                                              int64_t columns,
                                              void* target,
                                              int64_t stride) {
  auto* __restrict__ to = static_cast<Stored<Type>*>(target);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      to[i * stride + j] = Type::narrow(sums[i * sums_stride + j]);
    }
  }
}

template <typename Type, int kRows>
[[gnu::always_inline]] inline void round_columns(const float* __restrict__ sums,
                                                 int64_t sums_stride,
                                                 int64_t rows,
                                                 int64_t columns,
                                                 void* target,
                                                 int64_t stride) {
  auto* __restrict__ to = static_cast<Stored<Type>*>(target);
  if (rows == kRows) {
    for (int64_t j = 0; j < columns; ++j) {
      for (int i = 0; i < kRows; ++i) {
        to[j * stride + i] = Type::narrow(sums[i * sums_stride + j]);
      }
    }
    return;
  }
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t i = 0; i < rows; ++i) {
      to[j * stride + i] = Type::narrow(sums[i * sums_stride + j]);
    }
  }
}

// Plain functions, since only functions carry a target, and a table of them for each format.
#define MC_PACK_FUNCTIONS(name, kRows, kPadded, kColumns, target)                                  \
  template <typename Type>                                                                         \
  target void name##_left_by_rows(const void* source, int64_t stride, int64_t rows, int64_t depth, \
                                  float* left) {                                                   \
    left_by_rows<Type>(source, stride, rows, depth, left);                                         \
  }                                                                                                \
  template <typename Type>                                                                         \
  target void name##_left_by_depth(const void* source, int64_t stride, int64_t rows,               \
                                   int64_t depth, int64_t readable, float* left) {                 \
    left_by_depth<Type, kRows, kPadded>(source, stride, rows, depth, readable, left);              \
  }                                                                                                \
  template <typename Type>                                                                         \
  target void name##_right_by_depth(const void* source, int64_t stride, int64_t used,              \
                                    int64_t width, int64_t depth, float* right) {                  \
    right_by_depth<Type, kColumns>(source, stride, used, width, depth, right);                     \
  }                                                                                                \
  template <typename Type>                                                                         \
  target void name##_right_by_columns(const void* source, int64_t stride, int64_t used,            \
                                      int64_t width, int64_t depth, float* right) {                \
    right_by_columns<Type>(source, stride, used, width, depth, right);                             \
  }                                                                                                \
  template <typename Type>                                                                         \
  target void name##_round_rows(const float* sums, int64_t sums_stride, int64_t rows,              \
                                int64_t columns, void* to, int64_t stride) {                       \
    round_rows<Type>(sums, sums_stride, rows, columns, to, stride);                                \
  }                                                                                                \
  template <typename Type>                                                                         \
  target void name##_round_columns(const float* sums, int64_t sums_stride, int64_t rows,           \
                                   int64_t columns, void* to, int64_t stride) {                    \
    round_columns<Type, kRows>(sums, sums_stride, rows, columns, to, stride);                      \
  }                                                                                                \
  template <typename Type>                                                                         \
  constexpr PackKernels name##_table() {                                                           \
    return {.element_bytes = sizeof(Stored<Type>),                                                 \
            .left_by_rows = name##_left_by_rows<Type>,                                             \
            .left_by_depth = name##_left_by_depth<Type>,                                           \
            .right_by_depth = name##_right_by_depth<Type>,                                         \
            .right_by_columns = name##_right_by_columns<Type>,                                     \
            .round_rows = name##_round_rows<Type>,                                                 \
            .round_columns = name##_round_columns<Type>};                                          \
  }                                                                                                \
  /* In the order of NumberFormat. */                                                              \
  constexpr PackKernels name[] = {name##_table<Plain<float>>(), name##_table<BFloat16>(),          \
                                  name##_table<Float16>()};

MC_PACK_FUNCTIONS(kPack4, 6, 8, 8, )
#if defined(__x86_64__)
MC_PACK_FUNCTIONS(kPack8, 6, 8, 16, [[gnu::target("avx2,fma")]])
MC_PACK_FUNCTIONS(kPack16, 14, 16, 32, [[gnu::target("avx512f")]])
#endif

}  // namespace

const PackKernels& pack_kernels(NumberFormat format) {
  const auto index = static_cast<size_t>(format);
#if defined(__x86_64__)
  switch (tile_kernels().columns) {
    case 32:
      return kPack16[index];
    case 16:
      return kPack8[index];
    default:
      break;
  }
#endif
  return kPack4[index];
}

}  // namespace megacore::moe
