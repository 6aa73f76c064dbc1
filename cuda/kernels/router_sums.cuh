// Sums of a router over tokens, and its losses from them.

#pragma once

#include "launch.h"
#include "megacore/cuda/router.h"
#include "row_io.cuh"

namespace megacore::cuda {

inline constexpr int64_t kWarpsOfBlock = kRowThreads / kWarp;

// Numbers of a lane of a warp, one for every 32nd expert.
template <int kPerLane>
using Experts = float[kPerLane];

// The workspace: how many blocks of the second kernel are done; their parts of the losses; and, for
// each block and pool of the first, counts and totals of all experts and the sum of the z-loss.
struct RouterWorkspace {
  uint32_t* done;
  float* losses;  // (P, chunks + 1): of each chunk of experts, and of the z-loss
  float* sums;    // (blocks of a pool, P, 2 E + 1)
};

__host__ __device__ __forceinline__ int64_t chunks_of(const moe::RouterRule& rule) {
  return (rule.num_experts + kWarp - 1) / kWarp;
}

__device__ __forceinline__ RouterWorkspace workspace_of(const RouteParams& params) {
  float* const losses = params.workspace + 1;
  return {reinterpret_cast<uint32_t*>(params.workspace), losses,
          losses + params.rule.num_pools * (chunks_of(params.rule) + 1)};
}

__device__ __forceinline__ float* sums_of_block(const RouteParams& params, int64_t block) {
  const moe::RouterRule& rule = params.rule;
  return workspace_of(params).sums +
         (block * rule.num_pools + blockIdx.y) * (2 * rule.num_experts + 1);
}

// Adds up the sums of the warps of a block, in their order.
template <int kPerLane>
__device__ __forceinline__ void write_sums(const RouteParams& params,
                                           const Experts<kPerLane>& counts,
                                           const Experts<kPerLane>& totals,
                                           float squares) {
  constexpr int kExperts = kPerLane * kWarp;
  __shared__ float sums[2 * kExperts + 1];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int warp = 0; warp < kWarpsOfBlock; ++warp) {
    if (static_cast<int>(threadIdx.x) / kWarp == warp) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int expert = i * kWarp + lane;
        sums[expert] = warp == 0 ? counts[i] : sums[expert] + counts[i];
        float& total = sums[kExperts + expert];
        total = warp == 0 ? totals[i] : total + totals[i];
      }
      if (lane == 0) {
        sums[2 * kExperts] = warp == 0 ? squares : sums[2 * kExperts] + squares;
      }
    }
    __syncthreads();
  }
  const int64_t experts = params.rule.num_experts;
  float* const mine = sums_of_block(params, blockIdx.x);
  for (int expert = static_cast<int>(threadIdx.x); expert < experts; expert += kRowThreads) {
    mine[expert] = sums[expert];
    mine[experts + expert] = sums[kExperts + expert];
  }
  if (threadIdx.x == 0) {
    mine[2 * experts] = sums[2 * kExperts];
    if (blockIdx.x == 0 && blockIdx.y == 0) {
      *workspace_of(params).done = 0;
    }
  }
}

// All threads of a block call it; true, for all, in the last block to get there. That block sees
// what the others have written.
__device__ __forceinline__ bool is_last_block(uint32_t* done) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(done, 1U) == gridDim.x * gridDim.y - 1;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

// A block adds up a chunk of the experts of a pool; the last one adds up the losses.
static __global__ void __launch_bounds__(kRowThreads)
    sums_kernel(RouteParams params, int64_t num_blocks) {
  constexpr int kGroups = kRowThreads / kWarp;
  __shared__ float counts[kGroups][kWarp];
  __shared__ float totals[kGroups][kWarp];
  const moe::RouterRule& rule = params.rule;
  const moe::RouterSums& sums = params.routed.sums;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int group = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t experts = rule.num_experts;
  const int64_t expert = int64_t{blockIdx.x} * kWarp + lane;
  const int64_t parts = int64_t{gridDim.x} + 1;
  float count = 0.0F;
  float total = 0.0F;
#pragma unroll 4
  for (int64_t block = group; block < num_blocks; block += kGroups) {
    const float* from = sums_of_block(params, block);
    count += expert < experts ? from[expert] : 0.0F;
    total += expert < experts ? from[experts + expert] : 0.0F;
  }
  counts[group][lane] = count;
  totals[group][lane] = total;
  __syncthreads();
  float* const losses = workspace_of(params).losses;
  if (group == 0) {
    for (int other = 1; other < kGroups; ++other) {
      count += counts[other][lane];
      total += totals[other][lane];
    }
    if (expert < experts) {
      float* const stats = sums.stats + int64_t{blockIdx.y} * experts + expert;
      stats[0] = count;
      stats[rule.num_pools * experts] = total;
      if (sums.seen != nullptr) {
        atomicAdd(reinterpret_cast<unsigned long long*>(sums.seen) + expert,
                  static_cast<unsigned long long>(count));
      }
    }
    const float product = warp_sum(count * total);
    float squares = 0.0F;
    for (int64_t block = lane; blockIdx.x == 0 && block < num_blocks; block += kWarp) {
      squares += sums_of_block(params, block)[2 * experts];
    }
    squares = warp_sum(squares);
    if (lane == 0) {
      float* const mine = losses + int64_t{blockIdx.y} * parts;
      mine[blockIdx.x] = product;
      if (blockIdx.x == 0) {
        mine[parts - 1] = squares;
      }
    }
  }
  if (is_last_block(workspace_of(params).done) && group == 0) {
    float aux = 0.0F;
    float z = 0.0F;
    for (int64_t i = lane; i < rule.num_pools * parts; i += kWarp) {
      const float part = *const_cast<const volatile float*>(losses + i);
      aux += i % parts == parts - 1 ? 0.0F : part;
      z += i % parts == parts - 1 ? part : 0.0F;
    }
    aux = warp_sum(aux);
    z = warp_sum(z);
    if (lane == 0) {
      sums.losses[0] = aux * sums.scales.aux;
      sums.losses[1] = z * sums.scales.z;
    }
  }
}

}  // namespace megacore::cuda
