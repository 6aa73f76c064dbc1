#include "gemm_tile.h"

#include <cstring>
#include <utility>

#include "megacore/base/vector_clones.h"

namespace megacore::moe {
namespace {

// Operators on these become single instructions where the target has such registers. Memory is
// aligned for floats only, so it is read and written through memcpy.
using Float4 [[gnu::vector_size(16)]] = float;
using Float8 [[gnu::vector_size(32)]] = float;
using Float16 [[gnu::vector_size(64)]] = float;

// The left side has its rows kRowStride and its depth kDepthStride apart.
template <typename Vector, int kRows, int kVectors, int kRowStride, int kDepthStride>
[[gnu::always_inline]] inline void tile(const float* left,
                                        const float* right,
                                        int64_t depth,
                                        float* c,
                                        int64_t c_stride,
                                        bool accumulate) {
  constexpr int64_t kLanes = sizeof(Vector) / sizeof(float);
  Vector sums[kRows][kVectors] = {};
  for (int64_t d = 0; d < depth; ++d) {
    Vector row[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      memcpy(&row[v], right + v * kLanes, sizeof(Vector));
    }
#pragma GCC unroll 14
    for (int i = 0; i < kRows; ++i) {
      const float factor = left[i * kRowStride];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        sums[i][v] += row[v] * factor;
      }
    }
    left += kDepthStride;
    right += kVectors * kLanes;
  }
#pragma GCC unroll 14
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      float* target = c + i * c_stride + v * kLanes;
      if (accumulate) {
        Vector before;
        memcpy(&before, target, sizeof(Vector));
        sums[i][v] += before;
      }
      memcpy(target, &sums[i][v], sizeof(Vector));
    }
  }
}

// One plain function per height and instruction set, since only functions carry a target.
#define MC_TILE_FUNCTION(name, Vector, kDepth, target)                                       \
  template <int kRows, int kVectors, int kRowStride, int kDepthStride>                       \
  target void name(const float* left, const float* right, int64_t depth, float* c,           \
                   int64_t c_stride, bool accumulate) {                                      \
    tile<Vector, kRows, kVectors, kRowStride, kDepthStride>(left, right, depth, c, c_stride, \
                                                            accumulate);                     \
  }                                                                                          \
  template <int... kIndices>                                                                 \
  constexpr TileKernels name##_table(std::integer_sequence<int, kIndices...>) {              \
    constexpr int kMax = sizeof...(kIndices);                                                \
    return {.max_rows = kMax,                                                                \
            .columns = 2 * sizeof(Vector) / sizeof(float),                                   \
            .depth = kDepth,                                                                 \
            .by_rows = {.whole = {name<kIndices + 1, 2, kLeftStride, 1>...},                 \
                        .half = {name<kIndices + 1, 1, kLeftStride, 1>...}},                 \
            .by_depth = {.whole = {name<kIndices + 1, 2, 1, kMax>...},                       \
                         .half = {name<kIndices + 1, 1, 1, kMax>...}}};                      \
  }

// With kRightColumns columns in fp32, a packed block fills half of the second-level cache of
// processors with these instructions: 512 KiB, and 1 MiB with AVX-512.
MC_TILE_FUNCTION(tile_of_4, Float4, 256, )
// 12 sums, 2 vectors of the right side and a factor: 15 of 16 registers.
constexpr TileKernels kBaseline = tile_of_4_table(std::make_integer_sequence<int, 6>());

#if defined(__x86_64__)
MC_TILE_FUNCTION(tile_of_8, Float8, 256, [[gnu::target("avx2,fma")]])
MC_TILE_FUNCTION(tile_of_16, Float16, 512, [[gnu::target("avx512f")]])
constexpr TileKernels kAvx2 = tile_of_8_table(std::make_integer_sequence<int, 6>());
// 28 sums, 2 vectors of the right side: 30 of 32 registers; factors come from memory.
constexpr TileKernels kAvx512 = tile_of_16_table(std::make_integer_sequence<int, 14>());
#endif

}  // namespace

const TileKernels& tile_kernels() {
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
