// A router from its logits to weights, choices and losses, and back: the CUDA twin of
// megacore/moe/router.h.
//
// Neither allocates nor waits. Arithmetic is fp32; it agrees with the CPU to a few parts in 10^7,
// and so do choices but where two experts are as close. Sums have an order that depends on the
// sizes only.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megacore/moe/router.h"

namespace megacore::cuda {

inline constexpr int64_t kMaxRouterExperts = 1024;
inline constexpr int64_t kMaxRouterChoices = 32;

struct RouteParams {
  const float* logits = nullptr;  // (T, E)
  const float* bias = nullptr;    // (E) optional
  bool keeps_ids = false;
  moe::RouterRule rule = {};
  moe::Routed routed = {};
  float* workspace = nullptr;  // (route_workspace_numel) overwritten; not needed without sums
};

// Elements of the workspace of `route`, from the numbers of tokens, experts and pools.
int64_t route_workspace_numel(const moe::RouterRule& rule);

// One kernel for the tokens, and one for the sums and losses where there are any. Throws
// std::invalid_argument where a size is out of range, std::runtime_error if a launch fails.
void route(const RouteParams& params, cudaStream_t stream);

struct RouteBackwardParams {
  moe::RouterGrads grads = {};
  const float* logits = nullptr;
  const int64_t* ids = nullptr;  // (T, K)
  float* grad_logits = nullptr;  // (T, E) written
  moe::RouterRule rule = {};
};

void route_backward(const RouteBackwardParams& params, cudaStream_t stream);

}  // namespace megacore::cuda
