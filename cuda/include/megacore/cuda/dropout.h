// Dropout with a counter-based mask: the CUDA twin of megacore/layers/dropout.h, with equal bits.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megacore/cuda/float_type.h"
#include "megacore/layers/dropout.h"

namespace megacore::cuda {

struct DropoutParams {
  FloatType type = FloatType::kFloat32;
  const void* x = nullptr;              // (S, B, H)
  const int64_t* sample_ids = nullptr;  // (B)
  const int64_t* positions = nullptr;   // (S)
  const int64_t* key = nullptr;         // on the device; without it key_value
  int64_t key_value = 0;
  void* y = nullptr;  // (S, B, H) written
  layers::DropoutRule rule = {};
};

// One kernel, which neither allocates nor waits. Throws std::invalid_argument if a size is
// negative.
void dropout(const DropoutParams& params, cudaStream_t stream);

}  // namespace megacore::cuda
