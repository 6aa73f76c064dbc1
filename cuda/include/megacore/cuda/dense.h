// RMSNorm and rotation of heads, forward and backward: the CUDA twins of megacore/layers/dense.h.
//
// A launcher enqueues kernels on the given stream and returns: it neither allocates nor waits.
// Arithmetic is fp32 with one rounding at the end; it agrees with the CPU to a few parts in 10^7.
// Sums have an order that depends on the sizes only.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megacore/cuda/float_type.h"
#include "megacore/layers/dense.h"

namespace megacore::cuda {

// Packs of 16 bytes of a row of a norm at most: a block has them in registers.
inline constexpr int64_t kMaxNormPacks = 2048;

struct NormParams {
  FloatType type = FloatType::kFloat32;  // of x, weight and y
  const void* x = nullptr;               // (rows, width)
  const void* added = nullptr;           // (rows, width) optional; then x + added is normalized
  const void* weight = nullptr;          // (width)
  void* sum = nullptr;                   // (rows, width) x + added, rounded; written with `added`
  void* y = nullptr;                     // (rows, width) written
  float* scale = nullptr;                // (rows) written
  int64_t rows = 0;
  int64_t width = 0;  // a multiple of 16 bytes, of at most kMaxNormPacks
  float eps = 0.0F;
};

// Throws std::invalid_argument if a size or an address does not fit, std::runtime_error if a launch
// fails; so do all here.
void rms_norm(const NormParams& params, cudaStream_t stream);

struct NormBackwardParams {
  FloatType type = FloatType::kFloat32;
  const void* grad_y = nullptr;    // (rows, width)
  const void* grad_sum = nullptr;  // (rows, width) optional, added to the rounded grad_x
  const void* x = nullptr;         // or the sum that was normalized
  const void* weight = nullptr;
  const float* scale = nullptr;   // (rows) of the forward pass
  void* grad_x = nullptr;         // (rows, width) written, if given
  void* grad_weight = nullptr;    // (width) written, if given, with `partial_sums`
  float* partial_sums = nullptr;  // (norm_partial_rows, width) workspace
  int64_t rows = 0;
  int64_t width = 0;
};

// Rows of the workspace of rms_norm_backward.
int64_t norm_partial_rows(FloatType type, int64_t rows, int64_t width);

void rms_norm_backward(const NormBackwardParams& params, cudaStream_t stream);

struct RotateParams {
  FloatType type = FloatType::kFloat32;
  void* qkv = nullptr;  // see layers::split_and_rotate
  void* q = nullptr;
  void* k = nullptr;
  void* v = nullptr;
  const float* cos = nullptr;
  const float* sin = nullptr;
  layers::HeadShape shape = {};  // of an even head_dim
  bool backward = false;
};

void split_and_rotate(const RotateParams& params, cudaStream_t stream);

// Of a head that is normalized before it is rotated; and it must be a multiple of 32 bytes, as must
// its rotated part.
inline constexpr int64_t kMaxNormedHeadBytes = 1024;

struct NormRotateParams {
  RotateParams heads = {};         // backwards, qkv may be null
  const void* x = nullptr;         // qkv of the forward pass, read backwards
  const void* q_weight = nullptr;  // (head_dim)
  const void* k_weight = nullptr;
  float eps = 0.0F;
  float* scale = nullptr;  // (tokens, groups, q_per_kv + 1) written forward, read backwards
  // Backwards, the gradients of the weights if there is a workspace for them.
  void* grad_q_weight = nullptr;
  void* grad_k_weight = nullptr;
  float* partial_sums = nullptr;  // (norm_rotate_partial_rows, 2 head_dim)
};

// Rows of the workspace, for all heads of all tokens: queries, keys and values.
int64_t norm_rotate_partial_rows(int64_t num_heads);

// One launch forward, and one backwards or two with sums.
void norm_and_rotate(const NormRotateParams& params, cudaStream_t stream);

}  // namespace megacore::cuda
