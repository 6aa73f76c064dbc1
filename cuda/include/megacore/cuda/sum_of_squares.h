// The sum of the squares of many numbers, left on the device: for gradient norms and for the check
// that every gradient is finite.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megacore/cuda/float_type.h"

namespace megacore::cuda {

inline constexpr int64_t kSumBlocks = 1024;

struct SumOfSquaresParams {
  const void* values = nullptr;  // (numel) read
  FloatType type = FloatType::kFloat32;
  int64_t numel = 0;
  double* partial_sums = nullptr;  // (kSumBlocks) workspace, overwritten
  double* total = nullptr;         // one number, written
};

// Sums in fp64, in an order that depends on numel only. The total is finite exactly if every value
// is: no square of an fp32 number overflows fp64. Neither allocates nor waits.
// Throws std::runtime_error if a launch fails. REQUIRES: numel >= 0.
void sum_of_squares(const SumOfSquaresParams& params, cudaStream_t stream);

}  // namespace megacore::cuda
