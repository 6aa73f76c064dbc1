// Activations of experts times the weight of each row, forward and backward, in one pass.
//
//   swiglu: y = p * silu(gate) * up    x = [gate, up], (rows, 2 width)    y (rows, width)
//   gelu:   y = p * gelu(x), tanh form     x (rows, width)
//
// p is one number per row, or 1 if `probs` is null. Elements are fp32 or the bits of bfloat16;
// arithmetic is fp32. The relative error of the exponential is about 1e-7.

#pragma once

#include <cstdint>

namespace megacore::moe {

enum class Activation : uint8_t { kSwiglu, kGelu };

struct ActivationShape {
  int64_t rows;
  int64_t width;                      // of the result
  const int64_t* num_rows = nullptr;  // rows in use; the others are neither read nor written
};

// Float is float or uint16_t (bfloat16). REQUIRES: num_threads >= 1.
template <typename Float>
void activate(Activation kind,
              const Float* x,
              const float* probs,
              Float* y,
              const ActivationShape& shape,
              int num_threads);

// grad_probs (rows) is written when `probs` is given. REQUIRES: num_threads >= 1.
template <typename Float>
void activate_backward(Activation kind,
                       const Float* grad_y,
                       const Float* x,
                       const float* probs,
                       Float* grad_x,
                       float* grad_probs,
                       const ActivationShape& shape,
                       int num_threads);

}  // namespace megacore::moe
