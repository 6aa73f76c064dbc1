// Tiles of copies that are sorted by expert, for the kernels that sort them.
//
// The copies are cut into tiles, one per block, and a tile into stretches, one per warp. The first
// kernel counts the experts of each tile. In the second, every block finds where its tile's rows of
// each expert begin by adding up the counts of the tiles before it, and where each warp's begin by
// counting again; a warp then walks its stretch in order, 32 copies at a time. No step depends on
// which thread comes first.

#pragma once

#include "launch.h"
#include "megacore/base/check.h"
#include "megacore/cuda/permutation.h"
#include "row_io.cuh"

namespace megacore::cuda::sorting {

inline constexpr int kThreads = 512;
inline constexpr int kWarps = kThreads / kWarp;
inline constexpr int kExperts = static_cast<int>(kMaxSortedExperts);
inline constexpr int64_t kMaxTiles = 128;
static_assert(kExperts <= kThreads, "one thread per expert");

struct Tiling {
  int64_t tiles = 1;
  int64_t tile = kThreads;  // copies
};

// A tile has all of the `num_choices` copies of its tokens. There is one at least.
inline Tiling tiling_of(int64_t numel, int64_t num_choices) {
  const int64_t threads = std::max(int64_t{1}, divided_up(divided_up(numel, kMaxTiles), kThreads));
  const int64_t tile = divided_up(threads * kThreads, num_choices) * num_choices;
  return {std::max(int64_t{1}, divided_up(numel, tile)), tile};
}

inline int64_t workspace_numel(int64_t numel, int64_t num_choices, int64_t num_experts) {
  return tiling_of(numel, num_choices).tiles * num_experts;
}

struct Stretch {
  int64_t begin;
  int64_t end;
};

__device__ __forceinline__ Stretch stretch_of_warp(int64_t numel, int64_t tile) {
  const int64_t length = (tile + kWarps - 1) / kWarps;
  const int64_t first = int64_t{blockIdx.x} * tile;
  const int64_t begin = first + threadIdx.x / kWarp * length;
  const int64_t end = begin + length < first + tile ? begin + length : first + tile;
  return {begin, end < numel ? end : numel};
}

// The expert of a copy; kExperts for one that does not exist.
__device__ __forceinline__ int expert_at(const int64_t* expert_of,
                                         int64_t index,
                                         int64_t end,
                                         int num_experts) {
  if (index >= end) {
    return kExperts;
  }
  const int64_t expert = expert_of[index];
  return expert >= 0 && expert < num_experts ? static_cast<int>(expert) : kExperts;
}

// Calls visit(index, expert, mask of the lanes with that expert) for 32 copies at a time, in order.
template <typename Visit>
__device__ __forceinline__ void walk(const int64_t* expert_of,
                                     Stretch stretch,
                                     int num_experts,
                                     Visit visit) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int next = expert_at(expert_of, stretch.begin + lane, stretch.end, num_experts);
  for (int64_t first = stretch.begin; first < stretch.end; first += kWarp) {
    const int expert = next;
    next = expert_at(expert_of, first + kWarp + lane, stretch.end, num_experts);
    visit(first + lane, expert, __match_any_sync(kAllLanes, expert));
    __syncwarp();
  }
}

using WarpCounts = int[kExperts];

// Fills counts[warp][expert] for the tile of this block.
__device__ __forceinline__ void count_tile(const int64_t* expert_of,
                                           Stretch stretch,
                                           int num_experts,
                                           WarpCounts* counts) {
  int* flat = counts[0];
  for (int i = static_cast<int>(threadIdx.x); i < kWarps * kExperts; i += kThreads) {
    flat[i] = 0;
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int* mine = counts[threadIdx.x / kWarp];
  walk(expert_of, stretch, num_experts, [&](int64_t, int expert, unsigned peers) {
    if (expert < kExperts && lane == __ffs(static_cast<int>(peers)) - 1) {
      mine[expert] += __popc(peers);
    }
  });
  __syncthreads();
}

// Counts the experts of the tile of this block in the workspace.
__device__ __forceinline__ void count_block(const SortParams& params, int64_t tile) {
  __shared__ WarpCounts counts[kWarps];
  const int num_experts = static_cast<int>(params.num_experts);
  count_tile(params.expert_of, stretch_of_warp(params.numel, tile), num_experts, counts);
  const int expert = static_cast<int>(threadIdx.x);
  if (expert < num_experts) {
    int sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) {
      sum += counts[warp][expert];
    }
    params.workspace[int64_t{blockIdx.x} * num_experts + expert] = sum;
  }
}

// The sum of `value` over the threads before this one.
__device__ __forceinline__ int sum_before(int value, int* warp_sums) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  int sum = value;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int other = __shfl_up_sync(kAllLanes, sum, static_cast<unsigned>(distance));
    sum += lane >= distance ? other : 0;
  }
  if (lane == kWarp - 1) {
    warp_sums[warp] = sum;
  }
  __syncthreads();
  int before = sum - value;
  for (int w = 0; w < warp; ++w) {
    before += warp_sums[w];
  }
  return before;
}

// Writes the rows of the tile of this block, and the first block the counts.
__device__ __forceinline__ void place_block(const SortParams& params, int64_t tile) {
  __shared__ WarpCounts next_row[kWarps];
  __shared__ int warp_sums[kWarps];
  const int num_experts = static_cast<int>(params.num_experts);
  const Stretch stretch = stretch_of_warp(params.numel, tile);
  count_tile(params.expert_of, stretch, num_experts, next_row);

  const int expert = static_cast<int>(threadIdx.x);
  int total = 0;
  int in_earlier_tiles = 0;
  if (expert < num_experts) {
#pragma unroll 8
    for (unsigned block = 0; block < gridDim.x; ++block) {
      const int count = params.workspace[int64_t{block} * num_experts + expert];
      total += count;
      in_earlier_tiles += block < blockIdx.x ? count : 0;
    }
  }
  int row = sum_before(total, warp_sums) + in_earlier_tiles;
  if (expert < num_experts) {
    if (blockIdx.x == 0 && params.tokens_per_expert != nullptr) {
      params.tokens_per_expert[expert] = total;
    }
    for (int warp = 0; warp < kWarps; ++warp) {
      const int count = next_row[warp][expert];
      next_row[warp][expert] = row;
      row += count;
    }
  }
  __syncthreads();

  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int* mine = next_row[threadIdx.x / kWarp];
  const auto place = [&](int64_t index, int expert_of_copy, unsigned peers) {
    const bool exists = expert_of_copy < kExperts;
    const int before = __popc(peers & ((1U << lane) - 1U));
    if (index < stretch.end) {
      params.row_map[index] = exists ? mine[expert_of_copy] + before : -1;
    }
    __syncwarp();  // all have read before the first of each expert moves on
    if (exists && before == 0) {
      mine[expert_of_copy] += __popc(peers);
    }
  };
  walk(params.expert_of, stretch, num_experts, place);
}

}  // namespace megacore::cuda::sorting
