// Activations of experts times the weight of each row: the CUDA twins of
// megacore/moe/activations.h.
//
// A launcher enqueues one kernel on the given stream and returns: it neither allocates nor waits.
// Arithmetic is fp32 with one rounding at the end; it agrees with the CPU to a few parts in 10^7.
// The gradient of a row's weight is summed in an order that depends on the width only. Rows that
// are not in use are neither read nor written.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megacore/cuda/float_type.h"
#include "megacore/moe/activations.h"

namespace megacore::cuda {

struct ActivationParams {
  moe::Activation kind = moe::Activation::kSwiglu;
  FloatType type = FloatType::kFloat32;
  const void* x = nullptr;            // (rows, 2 width) for swiglu, (rows, width) for gelu
  const float* probs = nullptr;       // (rows) optional
  void* y = nullptr;                  // (rows, width) written
  const int64_t* num_rows = nullptr;  // rows in use, on the device; without it all
  int64_t rows = 0;
  int64_t width = 0;
};

void activate(const ActivationParams& params, cudaStream_t stream);

struct ActivationBackwardParams {
  moe::Activation kind = moe::Activation::kSwiglu;
  FloatType type = FloatType::kFloat32;
  const void* grad_y = nullptr;       // (rows, width)
  const void* x = nullptr;            // as in the forward pass
  const float* probs = nullptr;       // (rows) optional
  void* grad_x = nullptr;             // shape of x, written
  float* grad_probs = nullptr;        // (rows) written if probs is given
  const int64_t* num_rows = nullptr;  // rows in use, on the device; without it all
  int64_t rows = 0;
  int64_t width = 0;
};

void activate_backward(const ActivationBackwardParams& params, cudaStream_t stream);

}  // namespace megacore::cuda
