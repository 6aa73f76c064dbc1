// Sums over the rows of a matrix of partial sums, in a fixed order.

#pragma once

#include "launch.h"
#include "row_io.cuh"

namespace megacore::cuda {

inline constexpr int kColumnsOfBlock = kWarp;
inline constexpr int kGroupsOfBlock = kRowThreads / kColumnsOfBlock;

// Column c of (rows, width) is summed into first[c] for c < split, else into second[c - split].
template <typename Float>
__global__ void __launch_bounds__(kRowThreads) column_sums_kernel(const float* __restrict__ values,
                                                                  int64_t rows,
                                                                  int64_t width,
                                                                  int64_t split,
                                                                  Float* __restrict__ first,
                                                                  Float* __restrict__ second) {
  __shared__ float sums[kGroupsOfBlock][kColumnsOfBlock];
  const int lane = static_cast<int>(threadIdx.x) % kColumnsOfBlock;
  const int group = static_cast<int>(threadIdx.x) / kColumnsOfBlock;
  const int64_t column = int64_t{blockIdx.x} * kColumnsOfBlock + lane;
  float sum = 0.0F;
  if (column < width) {
#pragma unroll 4
    for (int64_t row = group; row < rows; row += kGroupsOfBlock) {
      sum += values[row * width + column];
    }
  }
  sums[group][lane] = sum;
  __syncthreads();
  if (group == 0 && column < width) {
    float total = 0.0F;
    for (int other = 0; other < kGroupsOfBlock; ++other) {
      total += sums[other][lane];
    }
    narrow(total, column < split ? first[column] : second[column - split]);
  }
}

template <typename Float>
void launch_column_sums(const char* name,
                        const float* values,
                        int64_t rows,
                        int64_t width,
                        int64_t split,
                        Float* first,
                        Float* second,
                        cudaStream_t stream) {
  launch(name, column_sums_kernel<Float>,
         {.blocks = divided_up(width, kColumnsOfBlock), .threads = kRowThreads}, stream, values,
         rows, width, split, first, second);
}

}  // namespace megacore::cuda
