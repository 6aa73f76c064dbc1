// Copies of tokens between token order and expert order. All of it is bound by memory: a token is
// read once and written once per copy, or the other way round, in 16-byte accesses with several
// loads in flight per thread.

#include "launch.h"
#include "megacore/base/check.h"
#include "megacore/cuda/permutation.h"
#include "row_io.cuh"

namespace megacore::cuda {
namespace {

// Packs that a thread loads before it uses the first.
constexpr int kInFlight = 4;

// Places within a row are 32-bit numbers, with room for the steps of a loop; rows are 64-bit ones.
constexpr int64_t kMaxRowElements = int64_t{1} << 30;

__device__ __forceinline__ bool lies(int64_t row, int64_t num_rows) {
  return row >= 0 && row < num_rows;
}

template <typename Float, int kPack>
__device__ __forceinline__ Pack<Float, kPack> scaled(const Pack<Float, kPack>& pack, float factor) {
  Pack<Float, kPack> result;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    narrow(factor * widen(pack.values[i]), result.values[i]);
  }
  return result;
}

template <typename Float, int kPack>
__global__ void __launch_bounds__(kRowThreads) permute_kernel(const Float* __restrict__ tokens,
                                                              const float* __restrict__ weights,
                                                              Float* __restrict__ rows,
                                                              uint8_t* __restrict__ is_written,
                                                              RowMap map,
                                                              int lanes) {
  const Team team = team_of(lanes);
  const int vectors = static_cast<int>(map.width / kPack);
  const int choices = static_cast<int>(map.num_choices);
  for (int64_t token = team.group; token < map.num_tokens; token += team.num_groups) {
    const int64_t* rows_of_token = map.rows + token * choices;
    if (is_written != nullptr) {
      for (int j = team.lane; j < choices; j += lanes) {
        const int64_t row = rows_of_token[j];
        if (lies(row, map.num_rows)) {
          is_written[row] = 1;
        }
      }
    }
    for (int start = team.lane; start < vectors; start += kInFlight * lanes) {
      Pack<Float, kPack> packs[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (start + u * lanes < vectors) {
          packs[u] = load_pack<kPack>(tokens + token * map.width, start + u * lanes);
        }
      }
      for (int j = 0; j < choices; ++j) {
        const int64_t row = rows_of_token[j];
        if (!lies(row, map.num_rows)) {
          continue;
        }
        Float* to = rows + row * map.width;
        const float factor = weights == nullptr ? 1.0F : weights[token * choices + j];
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          if (start + u * lanes < vectors) {
            store_pack(to, start + u * lanes,
                       weights == nullptr ? packs[u] : scaled(packs[u], factor));
          }
        }
      }
    }
  }
}

// Zeroes the rows that nobody wrote. A warp looks at 32 rows at once and, for each it has to clear,
// at one stretch of columns: where all rows are in use, hardly anything is read.
constexpr int64_t kClearedPacks = 4 * kWarp;

template <typename Float, int kPack>
__global__ void __launch_bounds__(kRowThreads) clear_kernel(Float* __restrict__ rows,
                                                            const uint8_t* __restrict__ is_written,
                                                            int64_t num_rows,
                                                            int64_t width) {
  const int64_t warps = int64_t{gridDim.x} * (kRowThreads / kWarp);
  const int64_t warp = (int64_t{blockIdx.x} * kRowThreads + threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t vectors = width / kPack;
  for (int64_t first = warp * kWarp; first < num_rows; first += warps * kWarp) {
    const bool is_clear = first + lane < num_rows && is_written[first + lane] == 0;
    unsigned open = __ballot_sync(kAllLanes, is_clear);
    while (open != 0) {
      const int64_t row = first + __ffs(static_cast<int>(open)) - 1;
      open &= open - 1;
      for (int64_t stretch = int64_t{blockIdx.y} * kClearedPacks; stretch < vectors;
           stretch += int64_t{gridDim.y} * kClearedPacks) {
        const int64_t end = stretch + kClearedPacks < vectors ? stretch + kClearedPacks : vectors;
        for (int64_t i = stretch + lane; i < end; i += kWarp) {
          store_pack(rows + row * width, i, Pack<Float, kPack>{});
        }
      }
    }
  }
}

template <typename Float, int kPack>
__global__ void __launch_bounds__(kRowThreads) unpermute_kernel(const Float* __restrict__ rows,
                                                                const float* __restrict__ weights,
                                                                Float* __restrict__ tokens,
                                                                RowMap map,
                                                                int lanes) {
  const Team team = team_of(lanes);
  const int vectors = static_cast<int>(map.width / kPack);
  const int choices = static_cast<int>(map.num_choices);
  for (int64_t token = team.group; token < map.num_tokens; token += team.num_groups) {
    const int64_t* rows_of_token = map.rows + token * choices;
    const float* factors = weights == nullptr ? nullptr : weights + token * choices;
    for (int i = team.lane; i < vectors; i += lanes) {
      float sums[kPack] = {};
      for (int first = 0; first < choices; first += kInFlight) {
        Pack<Float, kPack> packs[kInFlight];
        bool is_there[kInFlight];
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          const int64_t row = first + u < choices ? rows_of_token[first + u] : -1;
          is_there[u] = lies(row, map.num_rows);
          if (is_there[u]) {
            packs[u] = load_pack<kPack>(rows + row * map.width, i);
          }
        }
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          if (is_there[u]) {
            const float factor = factors == nullptr ? 1.0F : factors[first + u];
#pragma unroll
            for (int n = 0; n < kPack; ++n) {
              sums[n] = fmaf(factor, widen(packs[u].values[n]), sums[n]);
            }
          }
        }
      }
      Pack<Float, kPack> result;
#pragma unroll
      for (int n = 0; n < kPack; ++n) {
        narrow(sums[n], result.values[n]);
      }
      store_pack(tokens + token * map.width, i, result);
    }
  }
}

// One warp per copy; the copies of a token are neighbours, so that its row stays in the cache.
template <typename Float, int kPack>
__global__ void __launch_bounds__(kRowThreads) row_dots_kernel(const Float* __restrict__ tokens,
                                                               const Float* __restrict__ rows,
                                                               float* __restrict__ dots,
                                                               RowMap map) {
  const Team team = team_of(kWarp);
  const int vectors = static_cast<int>(map.width / kPack);
  const int64_t copies = map.num_tokens * map.num_choices;
  for (int64_t copy = team.group; copy < copies; copy += team.num_groups) {
    const int64_t row = map.rows[copy];
    float sum = 0.0F;
    if (lies(row, map.num_rows)) {
      const Float* token = tokens + copy / map.num_choices * map.width;
      const Float* other = rows + row * map.width;
      for (int start = team.lane; start < vectors; start += kInFlight * kWarp) {
        Pack<Float, kPack> packs[kInFlight] = {};
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          if (start + u * kWarp < vectors) {
            packs[u] = load_pack<kPack>(other, start + u * kWarp);
          }
        }
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          if (start + u * kWarp < vectors) {
            const Pack<Float, kPack> pack = load_pack<kPack>(token, start + u * kWarp);
#pragma unroll
            for (int n = 0; n < kPack; ++n) {
              sum = fmaf(widen(pack.values[n]), widen(packs[u].values[n]), sum);
            }
          }
        }
      }
    }
    sum = warp_sum(sum);
    if (team.lane == 0) {
      dots[copy] = sum;
    }
  }
}

void require_sizes(const RowMap& map) {
  MC_REQUIRE(map.num_tokens >= 0 && map.num_choices >= 0 && map.num_rows >= 0 && map.width >= 0,
             "a size is negative");
  MC_REQUIRE(map.num_choices <= kMaxRowElements && map.width <= kMaxRowElements,
             "{} choices of rows with {} elements; the kernels take up to {} of each",
             map.num_choices, map.width, kMaxRowElements);
}

LaunchShape groups_of(int64_t rows, int lanes) {
  return {.blocks = divided_up(rows, kRowThreads / lanes), .threads = kRowThreads};
}

// Up to this many bytes of a row it is cheaper to clear all rows than to find out which ones to.
constexpr int64_t kShortRowBytes = 64;

}  // namespace

void permute(const PermuteParams& params, cudaStream_t stream) {
  const RowMap& map = params.map;
  require_sizes(map);
  if (map.num_rows == 0 || map.width == 0) {
    return;
  }
  const int64_t row_bytes = map.width * bytes_of(params.type);
  const bool clear_all = row_bytes <= kShortRowBytes;
  check(clear_all
            ? cudaMemsetAsync(params.rows, 0, static_cast<size_t>(map.num_rows * row_bytes), stream)
            : cudaMemsetAsync(params.is_written, 0, static_cast<size_t>(map.num_rows), stream),
        "clearing memory for permute");
  const bool are_aligned = is_packed(params.tokens) && is_packed(params.rows);
  with_float_type(params.type, are_aligned, map.width, [&]<typename Float, int kPack>() {
    auto* rows = static_cast<Float*>(params.rows);
    uint8_t* is_written = clear_all ? nullptr : params.is_written;
    if (map.num_tokens > 0 && map.num_choices > 0) {
      const int lanes = lanes_for(map.width / kPack);
      launch("permute", permute_kernel<Float, kPack>, groups_of(map.num_tokens, lanes), stream,
             static_cast<const Float*>(params.tokens), params.weights, rows, is_written, map,
             lanes);
    }
    if (!clear_all) {
      LaunchShape shape = groups_of(divided_up(map.num_rows, kWarp), kWarp);
      shape.block_rows = std::min(divided_up(map.width / kPack, kClearedPacks), int64_t{65535});
      launch("permute", clear_kernel<Float, kPack>, shape, stream, rows,
             static_cast<const uint8_t*>(is_written), map.num_rows, map.width);
    }
  });
}

void unpermute(const UnpermuteParams& params, cudaStream_t stream) {
  const RowMap& map = params.map;
  require_sizes(map);
  if (map.num_tokens == 0 || map.width == 0) {
    return;
  }
  const bool are_aligned = is_packed(params.tokens) && is_packed(params.rows);
  with_float_type(params.type, are_aligned, map.width, [&]<typename Float, int kPack>() {
    const int lanes = lanes_for(map.width / kPack);
    launch("unpermute", unpermute_kernel<Float, kPack>, groups_of(map.num_tokens, lanes), stream,
           static_cast<const Float*>(params.rows), params.weights,
           static_cast<Float*>(params.tokens), map, lanes);
  });
}

void row_dots(const RowDotsParams& params, cudaStream_t stream) {
  const RowMap& map = params.map;
  require_sizes(map);
  if (map.num_tokens == 0 || map.num_choices == 0) {
    return;
  }
  const bool are_aligned = is_packed(params.tokens) && is_packed(params.rows);
  with_float_type(params.type, are_aligned, map.width, [&]<typename Float, int kPack>() {
    launch("row_dots", row_dots_kernel<Float, kPack>,
           groups_of(map.num_tokens * map.num_choices, kWarp), stream,
           static_cast<const Float*>(params.tokens), static_cast<const Float*>(params.rows),
           params.dots, map);
  });
}

}  // namespace megacore::cuda
