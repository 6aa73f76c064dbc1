// One warp per row. A lane holds every 32nd column as an integer that orders like its score; in
// each of k rounds the warp takes the highest, and among equals the lowest column.

#include "launch.h"
#include "megacore/base/check.h"
#include "megacore/cuda/topk.h"
#include "row_io.cuh"

namespace megacore::cuda {
namespace {

// Orders floats as integers, with NaN on top; never 0, which marks a column that is gone.
__device__ __forceinline__ uint32_t rank_of(float value) {
  const uint32_t bits = __float_as_uint(value == 0.0F ? 0.0F : value);
  const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;
  const uint32_t rank = (bits >> 31) != 0 ? ~bits : bits | 0x80000000U;
  return is_nan ? 0xffffffffU : rank;
}

template <int kPerLane>
__global__ void __launch_bounds__(kRowThreads) top_k_kernel(TopKParams params) {
  const Team team = team_of(kWarp);
  const int columns = static_cast<int>(params.columns);
  for (int64_t row = team.group; row < params.rows; row += team.num_groups) {
    uint32_t ranks[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int column = i * kWarp + team.lane;
      ranks[i] = column < columns ? rank_of(params.scores[row * columns + column]) : 0;
    }
    for (int64_t choice = 0; choice < params.k; ++choice) {
      uint32_t best = 0;
      unsigned column_of_best = 0xffffffffU;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (ranks[i] > best) {
          best = ranks[i];
          column_of_best = static_cast<unsigned>(i * kWarp + team.lane);
        }
      }
      const uint32_t highest = __reduce_max_sync(kAllLanes, best);
      const unsigned candidate = best == highest ? column_of_best : 0xffffffffU;
      const unsigned winner = __reduce_min_sync(kAllLanes, candidate);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        ranks[i] = static_cast<unsigned>(i * kWarp + team.lane) == winner ? 0 : ranks[i];
      }
      if (team.lane == 0) {
        params.chosen[row * params.k + choice] = winner;
      }
    }
  }
}

template <int kPerLane>
void launch_top_k(const TopKParams& params, cudaStream_t stream) {
  if constexpr (kPerLane * kWarp < kMaxTopKColumns) {
    if (params.columns > kPerLane * kWarp) {
      return launch_top_k<2 * kPerLane>(params, stream);
    }
  }
  launch("top_k", top_k_kernel<kPerLane>,
         {.blocks = divided_up(params.rows, kRowThreads / kWarp), .threads = kRowThreads}, stream,
         params);
}

}  // namespace

void top_k(const TopKParams& params, cudaStream_t stream) {
  MC_REQUIRE(params.columns >= 1 && params.columns <= kMaxTopKColumns,
             "{} columns; the kernel takes 1 to {}", params.columns, kMaxTopKColumns);
  MC_REQUIRE(params.rows >= 0 && params.k >= 1 && params.k <= params.columns,
             "k is {}; with {} columns it must lie in [1, {}]", params.k, params.columns,
             params.columns);
  if (params.rows > 0) {
    launch_top_k<1>(params, stream);
  }
}

}  // namespace megacore::cuda
