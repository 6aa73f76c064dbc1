// RMSNorm and rotation of heads, forward and backward, each in one pass.
//
// Elements are fp32 or the bits of bfloat16; arithmetic is fp32, rounded once. Results depend on
// the sizes only, not on the number of threads.

#pragma once

#include <cstdint>

namespace megacore::layers {

// y = x * scale * weight with scale (rows) = 1 / sqrt(mean(x^2) + eps). With `added`, x + added,
// rounded and written to `sum`, takes the place of x.
template <typename Float>
void rms_norm(const Float* x,
              const Float* added,
              const Float* weight,
              float eps,
              Float* sum,
              Float* y,
              float* scale,
              int64_t rows,
              int64_t width,
              int num_threads);

// Either of grad_x (rows, width) and grad_weight (width), fp32, may be null. `grad_sum`, if given,
// is added to the rounded grad_x: another gradient of x.
template <typename Float>
void rms_norm_backward(const Float* grad_y,
                       const Float* grad_sum,
                       const Float* x,
                       const Float* weight,
                       const float* scale,
                       Float* grad_x,
                       float* grad_weight,
                       int64_t rows,
                       int64_t width,
                       int num_threads);

struct HeadShape {
  int64_t num_tokens;  // S * B
  int64_t batch;
  int64_t num_groups;
  int64_t q_per_kv;
  int64_t head_dim;
  int64_t num_rotated;       // of each head, from the first; half-split form
  bool position_per_sample;  // cos and sin are (S, B, num_rotated / 2), not (S, num_rotated / 2)
};

// Splits qkv (S, B, G, Q + 2, D) into q (S, B, G, Q, D), k and v (S, B, G, D), and rotates q and k.
// Backwards, the gradients q, k and v become that of qkv.
template <typename Float>
void split_and_rotate(Float* qkv,
                      Float* q,
                      Float* k,
                      Float* v,
                      const float* cos,
                      const float* sin,
                      const HeadShape& shape,
                      bool backward,
                      int num_threads);

template <typename Float>
struct HeadNorms {
  const Float* q_weight;  // (D)
  const Float* k_weight;
  float eps;
  float* scale;  // (S, B, G, Q + 1) factors of the norms, written forward and read backward
};

// split_and_rotate whose queries and keys are normalized, each head on its own, and rounded before
// they are rotated: the bits of rms_norm and split_and_rotate in turn.
template <typename Float>
void norm_and_rotate(const Float* qkv,
                     const HeadNorms<Float>& norms,
                     Float* q,
                     Float* k,
                     Float* v,
                     const float* cos,
                     const float* sin,
                     const HeadShape& shape,
                     int num_threads);

// Gradients of the same, of `qkv` and, in fp32, of the weights; any of them may be null.
template <typename Float>
struct HeadGrads {
  const Float* q;
  const Float* k;
  const Float* v;
  Float* qkv;
  float* q_weight;
  float* k_weight;
};
template <typename Float>
void norm_and_rotate_backward(const HeadGrads<Float>& grads,
                              const Float* qkv,
                              const HeadNorms<Float>& norms,
                              const float* cos,
                              const float* sin,
                              const HeadShape& shape,
                              int num_threads);

}  // namespace megacore::layers
