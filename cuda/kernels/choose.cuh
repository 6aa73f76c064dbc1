// The best columns of a row by a warp: a lane holds every 32nd column as an integer that orders
// like its score, and in each round the warp takes the highest, among equals the lowest column.

#pragma once

#include "row_io.cuh"

namespace megacore::cuda {

// Orders floats as integers, with NaN on top; never 0, which marks a column that is gone.
__device__ __forceinline__ uint32_t rank_of(float value) {
  const uint32_t bits = __float_as_uint(value == 0.0F ? 0.0F : value);
  const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;
  const uint32_t rank = (bits >> 31) != 0 ? ~bits : bits | 0x80000000U;
  return is_nan ? 0xffffffffU : rank;
}

// Takes the best column out of `ranks` and returns it, to all lanes.
template <int kPerLane>
__device__ __forceinline__ unsigned take_best(uint32_t (&ranks)[kPerLane], int lane) {
  uint32_t best = 0;
  unsigned column_of_best = 0xffffffffU;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (ranks[i] > best) {
      best = ranks[i];
      column_of_best = static_cast<unsigned>(i * kWarp + lane);
    }
  }
  const uint32_t highest = __reduce_max_sync(kAllLanes, best);
  const unsigned candidate = best == highest ? column_of_best : 0xffffffffU;
  const unsigned winner = __reduce_min_sync(kAllLanes, candidate);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    ranks[i] = static_cast<unsigned>(i * kWarp + lane) == winner ? 0 : ranks[i];
  }
  return winner;
}

}  // namespace megacore::cuda
