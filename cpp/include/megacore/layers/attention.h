// Attention on the CPU: softmax(scale * q k^T) v for every head, and its backward pass.
//
// Blocks of queries meet blocks of keys in the tiles of matrix products (src/moe/gemm_tile.h), so
// no matrix of all scores is stored: memory is linear in the tokens. Causal attention computes the
// tiles that it needs. Elements may be fp32, bfloat16 or float16; scores and sums are fp32. Results
// do not depend on the number of threads.
//
// Source: Dao et al., "FlashAttention", 2022, arXiv:2205.14135, appendix B.

#pragma once

#include <cstdint>

#include "megacore/moe/grouped_gemm.h"

namespace megacore::layers {

// Largest dimension of a head.
inline constexpr int64_t kMaxHeadDim = 256;

struct AttentionShape {
  int64_t batch;
  int64_t heads;      // of queries, a multiple of those of keys
  int64_t key_heads;  // of keys and values
  int64_t queries;
  int64_t keys;
  int64_t dim;        // of queries and keys
  int64_t value_dim;  // of values
  float scale;
  bool is_causal;  // query i attends to keys up to i
};

// Elements between neighbours of a tensor (batch, head, token, element); those of a token are
// neighbours in memory.
struct HeadStrides {
  int64_t batch;
  int64_t head;
  int64_t token;
};

struct HeadsSource {
  moe::Source elements;
  HeadStrides strides;
};

struct HeadsTarget {
  moe::Target elements;
  HeadStrides strides;
};

// mixed (batch, heads, queries, value_dim), and the logarithm of each query's sum of exponentials,
// lse (batch, heads, queries).
// REQUIRES: all sizes >= 1, dimensions <= kMaxHeadDim, scale >= 0, num_threads >= 1, one format.
void attention(const AttentionShape& shape,
               const HeadsSource& q,
               const HeadsSource& k,
               const HeadsSource& v,
               const HeadsTarget& mixed,
               float* lse,
               int num_threads);

// Operands and results of `attention`, with the gradient of `mixed`.
struct AttentionPass {
  HeadsSource grad;
  HeadsSource q;
  HeadsSource k;
  HeadsSource v;
  HeadsSource mixed;
  const float* lse;
};

// Gradients of queries, keys and values. REQUIRES: as above.
void attention_backward(const AttentionShape& shape,
                        const AttentionPass& pass,
                        const HeadsTarget& grad_q,
                        const HeadsTarget& grad_k,
                        const HeadsTarget& grad_v,
                        int num_threads);

}  // namespace megacore::layers
