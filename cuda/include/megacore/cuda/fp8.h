// Rounding to 8-bit floats with a scale per block: the CUDA twins of megacore/moe/fp8.h, which
// specifies the results and their layout.
//
// A launcher enqueues one kernel on the given stream and returns: it neither allocates nor waits.
// The bits are those of the CPU, but for the sign of a NaN. Every element is read once.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megacore/cuda/float_type.h"
#include "megacore/moe/fp8.h"

namespace megacore::cuda {

struct QuantizeRowsParams {
  FloatType type = FloatType::kFloat32;
  const void* x = nullptr;            // (rows, width)
  uint8_t* values = nullptr;          // (rows, width) written
  float* scales = nullptr;            // (rows, ceil(width / 128)) written
  const int64_t* num_rows = nullptr;  // rows in use, on the device; without it all
  int64_t rows = 0;
  int64_t width = 0;
};

void quantize_rows(const QuantizeRowsParams& params, cudaStream_t stream);

struct QuantizeColumnsParams {
  FloatType type = FloatType::kFloat32;
  const void* x = nullptr;     // (rows, width)
  uint8_t* values = nullptr;   // written
  float* scales = nullptr;     // (row_blocks, width), written where used
  moe::ExpertRows shape = {};  // m_splits on the device
  bool transposed = false;
};

void quantize_columns(const QuantizeColumnsParams& params, cudaStream_t stream);

struct QuantizeBlocksParams {
  FloatType type = FloatType::kFloat32;
  const void* x = nullptr;    // (num, height, width)
  uint8_t* values = nullptr;  // written
  float* scales = nullptr;    // written
  int64_t num = 0;
  int64_t height = 0;
  int64_t width = 0;
  bool transposed = false;
};

void quantize_blocks(const QuantizeBlocksParams& params, cudaStream_t stream);

}  // namespace megacore::cuda
