// Rounding is bound by memory: every element is read once, kept in registers while the largest of
// its block is found, and written as a byte. Factors of products along rows and transposed weights
// are turned in shared memory, so that they too are written as lines of 128 bytes.

#include <cuda_fp8.h>

#include <type_traits>

#include "launch.h"
#include "megacore/base/check.h"
#include "megacore/cuda/fp8.h"
#include "row_io.cuh"

namespace megacore::cuda {
namespace {

using moe::scale_blocks;

constexpr int kBlock = static_cast<int>(moe::kScaleBlock);
constexpr int kPerThread = static_cast<int>(moe::kMaxGroupedExperts) / kRowThreads;
constexpr int kWarps = kRowThreads / kWarp;

template <typename Float>
__device__ __forceinline__ unsigned magnitude_bits(Float value) {
  return __float_as_uint(widen(value)) & 0x7fffffffU;
}

template <typename Float, int kPack>
__device__ __forceinline__ void raise(unsigned& largest, const Pack<Float, kPack>& pack) {
#pragma unroll
  for (int n = 0; n < kPack; ++n) {
    largest = max(largest, magnitude_bits(pack.values[n]));
  }
}

// Division by a scale. The quotient rounds to the byte that IEEE's rounds to, but needs no
// subroutine for numbers at the ends of the range: once the exponent of the scale is taken out,
// there are none but quotients that become zero.
class Divisor {
 public:
  Divisor() = default;
  __device__ __forceinline__ explicit Divisor(float scale) {
    const unsigned bits = __float_as_uint(scale);
    const unsigned exponent = (bits >> 23) & 0xffU;
    const bool is_finite = exponent != 0xffU;
    const float special = bits << 9 != 0 ? scale : 0.0F;  // of NaN, of infinity
    factor_ = is_finite ? __uint_as_float((254U - exponent) << 23) : special;
    mantissa_ = __uint_as_float((is_finite ? bits & 0x7fffffU : 0U) | 0x3f800000U);
    const float near = __fdividef(1.0F, mantissa_);
    inverse_ = fmaf(near, fmaf(-mantissa_, near, 1.0F), near);
  }

  __device__ __forceinline__ float divides(float value) const {
    const float scaled = value * factor_;
    const float first = scaled * inverse_;
    const float second = fmaf(fmaf(-first, mantissa_, scaled), inverse_, first);
    const float quotient = fmaf(fmaf(-second, mantissa_, scaled), inverse_, second);
    return copysignf(quotient, value);  // of a zero, too
  }

 private:
  float factor_;    // 2^-e of a scale m 2^e
  float mantissa_;  // m, from 1 to 2
  float inverse_;   // 1 / m
};

// Two quotients as bytes, the first in the low one.
__device__ __forceinline__ unsigned rounded_pair(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ unsigned rounded_four(float a, float b, float c, float d) {
  return rounded_pair(a, b) | rounded_pair(c, d) << 16;
}

// Writes a pack of a row, rounded; `divisor` gives the divisor of its nth element.
template <typename Float, int kPack, typename Divisors>
__device__ __forceinline__ void store_rounded(uint8_t* to,
                                              const Pack<Float, kPack>& pack,
                                              const Divisors& divisor) {
  if constexpr (kPack == 1) {
    *to = static_cast<uint8_t>(rounded_pair(divisor(0).divides(widen(pack.values[0])), 0.0F));
  } else {
    Pack<unsigned, kPack / 4> words;
#pragma unroll
    for (int n = 0; n < kPack; n += 4) {
      const auto quotient = [&](int i) { return divisor(i).divides(widen(pack.values[i])); };
      words.values[n / 4] =
          rounded_four(quotient(n), quotient(n + 1), quotient(n + 2), quotient(n + 3));
    }
    *reinterpret_cast<Pack<unsigned, kPack / 4>*>(to) = words;
  }
}

// ---- rows ---------------------------------------------------------------------------------------

// Columns of a warp: enough loads in flight, and enough warps where rows are few.
constexpr int kBlocksOfWarp = 8;

// Threads that share 128 elements of a row.
template <int kPack>
inline constexpr int kLanesOfBlock = kPack >= 4 ? kBlock / kPack : kWarp;

template <int kLanes>
__device__ __forceinline__ unsigned largest_of_lanes(unsigned value) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value = max(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

template <typename Float, int kPack>
__global__ void __launch_bounds__(kRowThreads, 3) quantize_rows_kernel(const Float* __restrict__ x,
                                                                       uint8_t* __restrict__ values,
                                                                       float* __restrict__ scales,
                                                                       const int64_t* num_rows,
                                                                       int64_t rows,
                                                                       int64_t width) {
  constexpr int kLanes = kLanesOfBlock<kPack>;
  constexpr int kTurns = kBlock / (kLanes * kPack);
  const Team team = team_of(kWarp);
  const int lane = team.lane % kLanes;
  const int64_t blocks = scale_blocks(width);
  const int64_t end = min(blocks, int64_t{kBlocksOfWarp} * (blockIdx.y + 1));
  rows = rows_in_use(num_rows, rows);
  for (int64_t row = team.group; row < rows; row += team.num_groups) {
    // Lanes of a warp take the same number of turns: they exchange their largest elements.
#pragma unroll 2
    for (int64_t first = int64_t{kBlocksOfWarp} * blockIdx.y; first < end;
         first += kWarp / kLanes) {
      const int64_t block = first + team.lane / kLanes;
      Pack<Float, kPack> packs[kTurns] = {};
      unsigned largest = 0;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int64_t column = block * kBlock + (turn * kLanes + lane) * kPack;
        if (column < width) {
          packs[turn] = load_pack<kPack>(x + row * width + column, 0);
        }
        raise(largest, packs[turn]);
      }
      const float scale = moe::scale_of(largest_of_lanes<kLanes>(largest));
      const Divisor divisor(scale);
      if (lane == 0 && block < end) {
        scales[row * blocks + block] = scale;
      }
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int64_t column = block * kBlock + (turn * kLanes + lane) * kPack;
        if (column < width) {
          store_rounded(values + row * width + column, packs[turn], [&](int) { return divisor; });
        }
      }
    }
  }
}

// ---- tiles: columns of an expert, and blocks of weights -----------------------------------------

// Blocks that share a multiprocessor, so that one loads while another computes. Single elements
// need more registers for their conditions, which spills are not worth.
template <int kPack>
inline constexpr int kMinBlocks = kPack == 1 ? 1 : 2;

// A tile of 128 rows and kColumns columns in the registers of a block. A thread holds kPack columns
// of consecutive rows, so that four of its elements are a word of the transposed tile.
template <typename Float, int kPack, int kColumns>
struct Tile {
  static constexpr int kLanes = kColumns / kPack;                        // threads of a row
  static constexpr int kRows = kBlock * kColumns / kRowThreads / kPack;  // of a thread
  static_assert(kRows % 4 == 0);
  // One word more than a column has, so that the lanes of a warp use different banks.
  using Turned = unsigned[kColumns][kBlock / 4 + 1];

  Pack<Float, kPack> packs[kRows];
  int row;     // first of the thread
  int column;  // first of the thread
  int height;  // rows of the tile that exist
  int width;   // columns that exist

  // `from` is the first element; rows are `stride` elements apart.
  __device__ __forceinline__ void load(const Float* __restrict__ from,
                                       int64_t stride,
                                       int64_t rows,
                                       int64_t columns) {
    const int thread = static_cast<int>(threadIdx.x);
    row = thread / kLanes * kRows;
    column = thread % kLanes * kPack;
    height = static_cast<int>(min(rows, int64_t{kBlock}));
    width = static_cast<int>(min(columns, int64_t{kColumns}));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      packs[i] = {};
      if (row + i < height && column < width) {
        packs[i] = load_pack<kPack>(from + (row + i) * stride + column, 0);
      }
    }
  }

  template <typename Divisors>
  __device__ __forceinline__ void store(uint8_t* __restrict__ to,
                                        int64_t stride,
                                        const Divisors& divisor) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (row + i < height && column < width) {
        store_rounded(to + (row + i) * stride + column, packs[i], divisor);
      }
    }
  }

  // All threads of the block call it. Writes `depth` rows of the tile as bytes of a column of
  // `to`, whose columns are `stride` bytes apart; words if all are aligned.
  template <typename Divisors>
  __device__ __forceinline__ void store_turned(uint8_t* __restrict__ to,
                                               int64_t stride,
                                               int depth,
                                               Turned& turned,
                                               const Divisors& divisor) const {
#pragma unroll
    for (int n = 0; n < kPack; ++n) {
#pragma unroll
      for (int i = 0; i < kRows; i += 4) {
        const auto quotient = [&](int j) {
          // No NaN for rows that are not there, whatever the others hold.
          return row + i + j < height ? divisor(n).divides(widen(packs[i + j].values[n])) : 0.0F;
        };
        turned[column + n][(row + i) / 4] =
            rounded_four(quotient(0), quotient(1), quotient(2), quotient(3));
      }
    }
    __syncthreads();
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const bool has_words =
        depth % 4 == 0 && stride % 4 == 0 && reinterpret_cast<uintptr_t>(to) % 4 == 0;
    for (int i = static_cast<int>(threadIdx.x) / kWarp; i < width; i += kWarps) {
      const unsigned word = turned[i][lane];
      uint8_t* place = to + i * stride + 4 * lane;
      if (has_words) {
        if (4 * lane < depth) {
          *reinterpret_cast<unsigned*>(place) = word;
        }
      } else {
        for (int n = 0; n < 4 && 4 * lane + n < depth; ++n) {
          place[n] = static_cast<uint8_t>(word >> (8 * n));
        }
      }
    }
    __syncthreads();  // before the next tile
  }
};

// The rows of one block of an expert.
struct BlockRows {
  int64_t start;   // first row
  int64_t count;   // from there to the end of the expert; 0 if no expert uses the block
  int64_t inside;  // number of the block among those of the expert
  int64_t blocks;  // of the expert
};

// Whose rows block blockIdx.x has, the same in all threads: each thread sums the counts of its
// experts, and a scan over the threads gives where its first one starts.
__device__ __forceinline__ BlockRows find_block(const moe::ExpertRows& shape) {
  __shared__ BlockRows found;
  __shared__ int64_t warp_sums[kWarps];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp;
  int64_t counts[kPerThread];
  int64_t own = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t expert = thread * kPerThread + i;
    counts[i] =
        expert < shape.num_experts ? moe::usable_count_of(shape.m_splits, expert, shape.rows) : 0;
    own += counts[i];
  }
  int64_t sum = own;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int64_t other = __shfl_up_sync(kAllLanes, sum, static_cast<unsigned>(distance));
    sum += lane >= distance ? other : 0;
  }
  if (lane == kWarp - 1) {
    warp_sums[thread / kWarp] = sum;
  }
  if (thread == 0) {
    found = {};
  }
  __syncthreads();
  int64_t end = sum - own;
  for (int before = 0; before < thread / kWarp; ++before) {
    end += warp_sums[before];
  }
  const int64_t block = blockIdx.x;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t expert = thread * kPerThread + i;
    end += counts[i];
    const moe::GroupRows rows = moe::rows_of_group(end, counts[i], shape.rows);
    const int64_t inside = block - moe::first_block_of(rows.start, expert);
    if (inside >= 0 && inside < scale_blocks(rows.count)) {
      found = {rows.start + inside * kBlock, rows.count - inside * kBlock, inside,
               scale_blocks(rows.count)};
    }
  }
  __syncthreads();
  return found;
}

constexpr int kColumnsOfTile = 64;
// Tiles of a block one after the other, which finds its rows only once.
constexpr int kTilesOfBlock = 4;

// The scales of the thread's columns, from the largest elements of all threads.
template <int kPack, typename TileOf>
__device__ __forceinline__ void find_scales(const TileOf& tile,
                                            unsigned (&largest)[kWarps][kColumnsOfTile],
                                            float (&scales)[kPack]) {
  // Lanes this far apart hold the same columns.
  constexpr int kSame = TileOf::kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int n = 0; n < kPack; ++n) {
    unsigned own = 0;
#pragma unroll
    for (int i = 0; i < TileOf::kRows; ++i) {
      own = max(own, magnitude_bits(tile.packs[i].values[n]));
    }
#pragma unroll
    for (int distance = kSame; distance < kWarp; distance *= 2) {
      own = max(own, __shfl_xor_sync(kAllLanes, own, distance));
    }
    largest[warp][tile.column + n] = own;
  }
  __syncthreads();
  // Where a row takes two warps, every second one holds this thread's columns.
  constexpr int kWarpsOfRow = kSame > kWarp ? kSame / kWarp : 1;
  const int first = kWarpsOfRow == 1 ? 0 : warp % kWarpsOfRow;
#pragma unroll
  for (int n = 0; n < kPack; ++n) {
    unsigned all = 0;
#pragma unroll
    for (int other = 0; other < kWarps; other += kWarpsOfRow) {
      all = max(all, largest[other + first][tile.column + n]);
    }
    scales[n] = moe::scale_of(all);
  }
}

template <typename Float, int kPack, bool kTransposed>
__global__ void __launch_bounds__(kRowThreads, kMinBlocks<kPack>)
    quantize_columns_kernel(const Float* __restrict__ x,
                            uint8_t* __restrict__ values,
                            float* __restrict__ scales,
                            moe::ExpertRows shape) {
  using TileOf = Tile<Float, kPack, kColumnsOfTile>;
  __shared__ unsigned largest[kWarps][kColumnsOfTile];
  __shared__ typename TileOf::Turned turned;
  const BlockRows rows = find_block(shape);
  if (rows.count == 0) {
    return;
  }
  const int64_t first = int64_t{blockIdx.y} * kTilesOfBlock * kColumnsOfTile;
  const int64_t end = min(shape.width, first + kTilesOfBlock * kColumnsOfTile);
#pragma unroll 1
  for (int64_t column = first; column < end; column += kColumnsOfTile) {
    TileOf tile;
    tile.load(x + rows.start * shape.width + column, shape.width, rows.count, shape.width - column);
    float own[kPack];
    find_scales<kPack>(tile, largest, own);
    Divisor divisors[kPack];
#pragma unroll
    for (int n = 0; n < kPack; ++n) {
      divisors[n] = Divisor(own[n]);
    }
    const auto divisor = [&](int n) -> const Divisor& { return divisors[n]; };
    if (tile.row == 0) {
#pragma unroll
      for (int n = 0; n < kPack; ++n) {
        if (tile.column + n < tile.width) {
          scales[int64_t{blockIdx.x} * shape.width + column + tile.column + n] = own[n];
        }
      }
    }
    if constexpr (kTransposed) {
      const int64_t depth = rows.blocks * kBlock;
      uint8_t* expert = values + (blockIdx.x - rows.inside) * kBlock * shape.width;
      tile.store_turned(expert + column * depth + rows.inside * kBlock, depth, kBlock, turned,
                        divisor);
    } else {
      tile.store(values + rows.start * shape.width + column, shape.width, divisor);
      __syncthreads();  // before the next tile
    }
  }
}

template <typename Float, int kPack, bool kTransposed>
__global__ void __launch_bounds__(kRowThreads, kMinBlocks<kPack>)
    quantize_blocks_kernel(const Float* __restrict__ x,
                           uint8_t* __restrict__ values,
                           float* __restrict__ scales,
                           int64_t height,
                           int64_t width) {
  using TileOf = Tile<Float, kPack, kBlock>;
  __shared__ unsigned largest[kWarps];
  __shared__ typename TileOf::Turned turned;
  const int64_t down = scale_blocks(height), across = scale_blocks(width);
  const int64_t matrix = blockIdx.x / across, right = blockIdx.x % across, below = blockIdx.y;
  const int64_t row = below * kBlock, column = right * kBlock;
  const int64_t start = matrix * height * width;
  TileOf tile;
  tile.load(x + start + row * width + column, width, height - row, width - column);
  unsigned own = 0;
#pragma unroll
  for (int i = 0; i < TileOf::kRows; ++i) {
    raise(own, tile.packs[i]);
  }
  own = __reduce_max_sync(kAllLanes, own);
  if (threadIdx.x % kWarp == 0) {
    largest[threadIdx.x / kWarp] = own;
  }
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    own = max(own, largest[warp]);
  }
  const float scale = moe::scale_of(own);
  if (threadIdx.x == 0) {
    scales[matrix * down * across + (kTransposed ? right * down + below : below * across + right)] =
        scale;
  }
  const Divisor divisor(scale);
  const auto same = [&](int) { return divisor; };
  if constexpr (kTransposed) {
    tile.store_turned(values + start + column * height + row, height, tile.height, turned, same);
  } else {
    tile.store(values + start + row * width + column, width, same);
  }
}

void require_sizes(int64_t rows, int64_t width) {
  MC_REQUIRE(rows >= 0 && width >= 0, "sizes must be at least 0, got {} rows of {}", rows, width);
}

// Calls body.operator()<transposed>().
template <typename Body>
void with_layout(bool transposed, Body&& body) {
  if (transposed) {
    body.template operator()<true>();
  } else {
    body.template operator()<false>();
  }
}

constexpr int64_t kMaxGridRows = 65535;

}  // namespace

void quantize_rows(const QuantizeRowsParams& params, cudaStream_t stream) {
  require_sizes(params.rows, params.width);
  if (params.rows == 0 || params.width == 0) {
    return;
  }
  const int64_t chunks = divided_up(scale_blocks(params.width), kBlocksOfWarp);
  MC_REQUIRE(chunks <= kMaxGridRows, "rows of {} elements are too wide to be rounded",
             params.width);
  const bool are_aligned = is_packed(params.x) && is_packed(params.values);
  with_float_type(params.type, are_aligned, params.width, [&]<typename Float, int kPack>() {
    launch("quantize_rows", quantize_rows_kernel<Float, kPack>,
           {.blocks = divided_up(params.rows, kRowThreads / kWarp),
            .threads = kRowThreads,
            .block_rows = chunks},
           stream, static_cast<const Float*>(params.x), params.values, params.scales,
           params.num_rows, params.rows, params.width);
  });
}

void quantize_columns(const QuantizeColumnsParams& params, cudaStream_t stream) {
  const moe::ExpertRows& shape = params.shape;
  require_sizes(shape.rows, shape.width);
  MC_REQUIRE(shape.num_experts >= 1 && shape.num_experts <= moe::kMaxGroupedExperts,
             "num_experts must be 1 to {}, got {}", moe::kMaxGroupedExperts, shape.num_experts);
  MC_REQUIRE(shape.m_splits != nullptr || shape.num_experts == 1, "{} experts need m_splits",
             shape.num_experts);
  if (shape.rows == 0 || shape.width == 0) {
    return;
  }
  const int64_t chunks = divided_up(shape.width, kTilesOfBlock * kColumnsOfTile);
  MC_REQUIRE(chunks <= kMaxGridRows, "rows of {} elements are too wide to be rounded", shape.width);
  const bool are_aligned = is_packed(params.x) && is_packed(params.values);
  with_float_type(params.type, are_aligned, shape.width, [&]<typename Float, int kPack>() {
    with_layout(params.transposed, [&]<bool kTransposed>() {
      launch("quantize_columns", quantize_columns_kernel<Float, kPack, kTransposed>,
             {.blocks = moe::row_blocks(shape.rows, shape.num_experts),
              .threads = kRowThreads,
              .block_rows = chunks},
             stream, static_cast<const Float*>(params.x), params.values, params.scales, shape);
    });
  });
}

void quantize_blocks(const QuantizeBlocksParams& params, cudaStream_t stream) {
  require_sizes(params.num * params.height, params.width);
  if (params.num == 0 || params.height == 0 || params.width == 0) {
    return;
  }
  MC_REQUIRE(scale_blocks(params.height) <= kMaxGridRows,
             "matrices of {} rows are too tall to be rounded", params.height);
  const bool are_aligned = is_packed(params.x) && is_packed(params.values);
  with_float_type(params.type, are_aligned, params.width, [&]<typename Float, int kPack>() {
    with_layout(params.transposed, [&]<bool kTransposed>() {
      launch("quantize_blocks", quantize_blocks_kernel<Float, kPack, kTransposed>,
             {.blocks = params.num * scale_blocks(params.width),
              .threads = kRowThreads,
              .block_rows = scale_blocks(params.height)},
             stream, static_cast<const Float*>(params.x), params.values, params.scales,
             params.height, params.width);
    });
  });
}

}  // namespace megacore::cuda
