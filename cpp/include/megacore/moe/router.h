// A router from its logits to the weights of the chosen experts and the sums of its load-balancing
// loss, in one pass, and back. fp32. Results do not depend on the number of threads.
//
// Shapes: T tokens, E experts, K choices per token, P pools of tokens; token t is in pool t mod P.

#pragma once

#include <cstdint>

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

struct Routed {
  float* probs;   // (T, K)
  int64_t* ids;   // (T, K)
  float* counts;  // (P, E) choices of each expert
  float* totals;  // (P, E) sums of scores that are 1 in sum for each token
};

// With `keeps_ids`, `ids` has the choices; else the best experts are chosen, where `bias` (E), or
// null, is added to what ranks them. The lower expert wins a tie.
void route(const float* logits,
           const float* bias,
           bool keeps_ids,
           const RouterRule& rule,
           const Routed& routed,
           int num_threads);

// grad_logits (T, E) from the gradients of `probs` and of `totals`, which may be null.
void route_backward(const float* grad_probs,
                    const float* grad_totals,
                    const float* logits,
                    const int64_t* ids,
                    float* grad_logits,
                    const RouterRule& rule,
                    int num_threads);

}  // namespace megacore::moe
