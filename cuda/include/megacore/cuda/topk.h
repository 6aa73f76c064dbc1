// The best columns of each row, with the CPU's choice among equals.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace megacore::cuda {

inline constexpr int64_t kMaxTopKColumns = 1024;

struct TopKParams {
  const float* scores = nullptr;  // (rows, columns)
  int64_t rows = 0;
  int64_t columns = 0;        // [1, kMaxTopKColumns]
  int64_t k = 0;              // [1, columns]
  int64_t* chosen = nullptr;  // (rows, k) written: columns, the largest score first
};

// The lower column wins a tie, a NaN beats numbers, and zeros are equal whatever their sign.
// Neither allocates nor waits. Throws std::invalid_argument where a size is out of range,
// std::runtime_error if the launch fails.
void top_k(const TopKParams& params, cudaStream_t stream);

}  // namespace megacore::cuda
