// A router from its logits to the weights of the chosen experts and its losses, in one pass, and
// back. fp32. Results do not depend on the number of threads.
//
// The load-balancing loss is the sum over pools and experts of counts times totals; the z-loss is
// the sum over tokens of logsumexp(logits)^2; both times a scale.
//
// Shapes: T tokens, E experts, K choices per token, P pools of tokens; token t is in pool t mod P.

#pragma once

#include <cstdint>

#include "megacore/base/host_device.h"

namespace megacore::moe {

struct RouterRule {
  int64_t num_tokens;
  int64_t num_experts;
  int64_t top_k;
  int64_t num_pools;
  bool is_sigmoid;           // scores; else softmax
  bool softmax_after_top_k;  // weights are the softmax of the chosen logits
  bool normalize;            // else weights are divided by their sum
  float scaling;
};

struct LossScales {
  float aux = 0.0F;  // of the load-balancing loss
  float z = 0.0F;
};

// Sums over tokens; without `losses` none are computed.
struct RouterSums {
  // (2, P, E): choices of each expert, and sums of scores that are 1 in sum for each token
  float* stats = nullptr;
  float* losses = nullptr;  // (2): load-balancing loss, z-loss
  int64_t* seen = nullptr;  // (E) optional: the choices of all pools are added
  LossScales scales = {};
};

struct Routed {
  float* probs = nullptr;  // (T, K)
  int64_t* ids = nullptr;  // (T, K)
  RouterSums sums = {};
};

// Gradient of a loss, from which the backward pass starts: a factor for all tokens, or (n) those of
// the tokens t mod n. None if null.
struct LossFactors {
  const float* values = nullptr;
  int64_t count = 1;

  MC_HOST_DEVICE float of(int64_t token) const { return values[token % count]; }
};

struct RouterGrads {
  const float* probs = nullptr;   // (T, K)
  const float* counts = nullptr;  // (P, E) choices of each expert, of all ranks of a pool
  LossFactors aux = {};           // of the mean of the load-balancing losses of the pools
  LossFactors z = {};
  LossScales scales = {};

  // The gradient of a score total in the pool of a token is this times the count.
  MC_HOST_DEVICE float aux_slope(int64_t token, int64_t num_pools) const {
    return aux.of(token % num_pools) / static_cast<float>(num_pools) * scales.aux;
  }
  // Gradient of logsumexp(logits).
  MC_HOST_DEVICE float z_slope(int64_t token, float log_sum_exp) const {
    return 2.0F * z.of(token) * scales.z * log_sum_exp;
  }
};

// With `keeps_ids`, `ids` has the choices; else the best experts are chosen, where `bias` (E), or
// null, is added to what ranks them. The lower expert wins a tie.
void route(const float* logits,
           const float* bias,
           bool keeps_ids,
           const RouterRule& rule,
           const Routed& routed,
           int num_threads);

// grad_logits (T, E) from the gradient of `probs` and those of the losses that have factors.
void route_backward(const RouterGrads& grads,
                    const float* logits,
                    const int64_t* ids,
                    float* grad_logits,
                    const RouterRule& rule,
                    int num_threads);

}  // namespace megacore::moe
