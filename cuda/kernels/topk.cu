// One warp per row.

#include "choose.cuh"
#include "launch.h"
#include "megacore/base/check.h"
#include "megacore/cuda/topk.h"
#include "row_io.cuh"

namespace megacore::cuda {
namespace {

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
      const unsigned winner = take_best(ranks, team.lane);
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
