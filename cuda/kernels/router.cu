// One warp per token; a lane has every 32nd expert. Sums over tokens are kept in registers by each
// warp, for tokens of one pool, and added up by a second kernel, whose last block has the losses.

#include <cmath>

#include "choose.cuh"
#include "launch.h"
#include "megacore/base/check.h"
#include "megacore/cuda/router.h"
#include "router_sums.cuh"

namespace megacore::cuda {
namespace {

constexpr float kTiny = 1e-20F;        // as on the CPU
constexpr float kNoLogit = -INFINITY;  // behind the last expert
// Tokens that are worth a warp, and blocks for a pool: constants, so that sums are the same on
// every GPU.
constexpr int64_t kTokensOfWarp = 4;
constexpr int64_t kMostBlocksOfPool = 64;

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

// Sum over the experts, the same in all lanes; those behind the last are zero.
template <int kPerLane>
__device__ __forceinline__ float sum_of(const Experts<kPerLane>& values) {
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    sum += values[i];
  }
  return warp_sum(sum);
}

template <int kPerLane>
__device__ __forceinline__ float dot_of(const Experts<kPerLane>& x, const Experts<kPerLane>& y) {
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    sum += x[i] * y[i];
  }
  return warp_sum(sum);
}

// The value of expert `id`, to all lanes. Not by an index, for which values would go to memory.
template <int kPerLane>
__device__ __forceinline__ float value_of(const Experts<kPerLane>& values, unsigned id, int lane) {
  float mine = 0.0F;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    mine = static_cast<unsigned>(i * kWarp + lane) == id ? values[i] : mine;
  }
  return __shfl_sync(kAllLanes, mine, static_cast<int>(id % kWarp));
}

template <int kPerLane>
__device__ __forceinline__ void load(
    const float* from, int64_t count, int lane, Experts<kPerLane>& to, float other) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = i * kWarp + lane;
    to[i] = expert < count ? from[expert] : other;
  }
}

// Scores of a token; zero behind the last expert, where logits are -infinity.
template <int kPerLane>
__device__ __forceinline__ void score(bool is_sigmoid,
                                      const Experts<kPerLane>& logits,
                                      Experts<kPerLane>& scores) {
  if (is_sigmoid) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      scores[i] = 1.0F / (1.0F + expf(-logits[i]));
    }
    return;
  }
  float highest = logits[0];
#pragma unroll
  for (int i = 1; i < kPerLane; ++i) {
    highest = fmaxf(highest, logits[i]);
  }
  highest = warp_max(highest);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    scores[i] = expf(logits[i] - highest);
  }
  const float sum = sum_of(scores);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    scores[i] /= sum;
  }
}

template <int kPerLane>
__device__ __forceinline__ float log_sum_exp(const Experts<kPerLane>& logits) {
  float highest = logits[0];
#pragma unroll
  for (int i = 1; i < kPerLane; ++i) {
    highest = fmaxf(highest, logits[i]);
  }
  highest = warp_max(highest);
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    sum += expf(logits[i] - highest);
  }
  return highest + logf(warp_sum(sum));
}

// What ranks the experts, and what the weights of the chosen are made of.
template <int kPerLane>
__device__ __forceinline__ void choose_basis(const moe::RouterRule& rule,
                                             const Experts<kPerLane>& logits,
                                             const Experts<kPerLane>& scores,
                                             Experts<kPerLane>& basis) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    basis[i] = rule.softmax_after_top_k ? logits[i] : scores[i];
  }
}

// A token's choice, in the lane of its number; the other lanes have none.
struct Choice {
  unsigned id;
  float weight;   // before scaling
  float divisor;  // of the weight
};

// Weights of the chosen, from what ranks a lane's choice: its logit or its score.
__device__ __forceinline__ Choice weigh(const moe::RouterRule& rule,
                                        unsigned id,
                                        float value,
                                        bool is_chosen) {
  if (rule.softmax_after_top_k) {
    const float highest = warp_max(is_chosen ? value : kNoLogit);
    const float weight = is_chosen ? expf(value - highest) : 0.0F;
    return {id, weight / warp_sum(weight), 1.0F};
  }
  const float weight = is_chosen ? value : 0.0F;
  const float divisor = rule.normalize ? warp_sum(weight) + kTiny : 1.0F;
  return {id, weight / divisor, divisor};
}

template <int kPerLane>
__global__ void __launch_bounds__(kRowThreads) route_kernel(RouteParams params) {
  const moe::RouterRule& rule = params.rule;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t warp = blockIdx.x * kWarpsOfBlock + threadIdx.x / kWarp;
  const int64_t pool = blockIdx.y;
  const int64_t experts = rule.num_experts;
  const int choices = static_cast<int>(rule.top_k);
  Experts<kPerLane> counts = {};
  Experts<kPerLane> totals = {};
  float squares = 0.0F;
  const bool has_sums = params.routed.sums.losses != nullptr;
  const bool has_z = has_sums && params.routed.sums.scales.z != 0.0F;
  for (int64_t t = warp * rule.num_pools + pool; t < rule.num_tokens;
       t += gridDim.x * kWarpsOfBlock * rule.num_pools) {
    Experts<kPerLane> logits;
    Experts<kPerLane> scores;
    Experts<kPerLane> basis;
    load(params.logits + t * experts, experts, lane, logits, kNoLogit);
    if (has_z) {
      const float log = log_sum_exp(logits);
      squares += log * log;
    }
    score(rule.is_sigmoid, logits, scores);
    choose_basis(rule, logits, scores, basis);
    unsigned id = 0;
    if (params.keeps_ids) {
      id = lane < choices ? static_cast<unsigned>(params.routed.ids[t * choices + lane]) : 0;
    } else {
      uint32_t ranks[kPerLane];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int expert = i * kWarp + lane;
        const float bias = params.bias != nullptr && expert < experts ? params.bias[expert] : 0.0F;
        ranks[i] = expert < experts ? rank_of(basis[i] + bias) : 0;
      }
      for (int choice = 0; choice < choices; ++choice) {
        const unsigned winner = take_best(ranks, lane);
        id = lane == choice ? winner : id;
      }
    }
    float value = 0.0F;
    for (int choice = 0; choice < choices; ++choice) {
      const unsigned chosen = __shfl_sync(kAllLanes, id, choice);
      const float found = value_of(basis, chosen, lane);
      value = lane == choice ? found : value;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        counts[i] += static_cast<unsigned>(i * kWarp + lane) == chosen ? 1.0F : 0.0F;
      }
    }
    const Choice choice = weigh(rule, id, value, lane < choices);
    if (lane < choices) {
      params.routed.probs[t * choices + lane] = choice.weight * rule.scaling;
      params.routed.ids[t * choices + lane] = choice.id;
    }
    const float sum = rule.is_sigmoid ? sum_of(scores) + kTiny : 1.0F;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      totals[i] += scores[i] / sum;
    }
  }
  if (has_sums) {
    write_sums(params, counts, totals, squares);
  }
}

// Gradient of the scores of a token.
template <int kPerLane>
__device__ __forceinline__ void grad_of_scores(const moe::RouterRule& rule,
                                               const Experts<kPerLane>& grad_totals,
                                               const Experts<kPerLane>& scores,
                                               const Choice& choice,
                                               float grad_prob,
                                               int lane,
                                               Experts<kPerLane>& grad) {
  float radial = 0.0F;
  float sum = 1.0F;
  if (rule.is_sigmoid) {
    sum = sum_of(scores) + kTiny;
    radial = dot_of(grad_totals, scores) / sum;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    grad[i] = rule.is_sigmoid ? (grad_totals[i] - radial) / sum : grad_totals[i];
  }
  if (rule.softmax_after_top_k) {
    return;
  }
  const float along = rule.normalize ? warp_sum(grad_prob * choice.weight) : 0.0F;
  const float mine = rule.scaling * (grad_prob - along) / choice.divisor;
  for (int j = 0; j < static_cast<int>(rule.top_k); ++j) {
    const unsigned id = __shfl_sync(kAllLanes, choice.id, j);
    const float value = __shfl_sync(kAllLanes, mine, j);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      grad[i] += static_cast<unsigned>(i * kWarp + lane) == id ? value : 0.0F;
    }
  }
}

template <int kPerLane>
__global__ void __launch_bounds__(kRowThreads) route_backward_kernel(RouteBackwardParams params) {
  const moe::RouterRule& rule = params.rule;
  const moe::RouterGrads& grads = params.grads;
  const Team team = team_of(kWarp);
  const int lane = team.lane;
  const int64_t experts = rule.num_experts;
  const int choices = static_cast<int>(rule.top_k);
  for (int64_t t = team.group; t < rule.num_tokens; t += team.num_groups) {
    Experts<kPerLane> logits;
    Experts<kPerLane> scores;
    Experts<kPerLane> basis;
    Experts<kPerLane> grad_totals;
    Experts<kPerLane> grad;
    load(params.logits + t * experts, experts, lane, logits, kNoLogit);
    // None are as good as zeros; the number is the same for all lanes.
    const int64_t num_counts = grads.aux.values == nullptr ? 0 : experts;
    load(grads.counts + t % rule.num_pools * num_counts, num_counts, lane, grad_totals, 0.0F);
    const float aux_slope = num_counts == 0 ? 0.0F : grads.aux_slope(t, rule.num_pools);
    float log = 0.0F;
    float z_slope = 0.0F;
    if (grads.z.values != nullptr) {
      log = log_sum_exp(logits);
      z_slope = grads.z_slope(t, log);
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      grad_totals[i] *= aux_slope;
    }
    score(rule.is_sigmoid, logits, scores);
    choose_basis(rule, logits, scores, basis);
    const bool is_chosen = lane < choices;
    const unsigned id = is_chosen ? static_cast<unsigned>(params.ids[t * choices + lane]) : 0;
    const float grad_prob = is_chosen ? grads.probs[t * choices + lane] : 0.0F;
    float value = 0.0F;
    for (int j = 0; j < choices; ++j) {
      const unsigned chosen = __shfl_sync(kAllLanes, id, j);
      const float found = value_of(basis, chosen, lane);
      value = lane == j ? found : value;
    }
    const Choice choice = weigh(rule, id, value, is_chosen);
    grad_of_scores(rule, grad_totals, scores, choice, grad_prob, lane, grad);
    const float radial = rule.is_sigmoid ? 0.0F : dot_of(grad, scores);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float slope = rule.is_sigmoid ? 1.0F - scores[i] : 1.0F;
      grad[i] = scores[i] * slope * (grad[i] - radial);
    }
    if (rule.softmax_after_top_k) {
      const float mean = warp_sum(grad_prob * choice.weight);
      const float mine = rule.scaling * choice.weight * (grad_prob - mean);
      for (int j = 0; j < choices; ++j) {
        const unsigned chosen = __shfl_sync(kAllLanes, id, j);
        const float part = __shfl_sync(kAllLanes, mine, j);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          grad[i] += static_cast<unsigned>(i * kWarp + lane) == chosen ? part : 0.0F;
        }
      }
    }
    if (grads.z.values != nullptr) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        grad[i] += z_slope * expf(logits[i] - log);
      }
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = i * kWarp + lane;
      if (expert < experts) {
        params.grad_logits[t * experts + expert] = grad[i];
      }
    }
  }
}

// ---- launchers ----------------------------------------------------------------------------------

void require_rule(const moe::RouterRule& rule) {
  MC_REQUIRE(rule.num_experts >= 1 && rule.num_experts <= kMaxRouterExperts,
             "{} experts; the kernel takes 1 to {}", rule.num_experts, kMaxRouterExperts);
  MC_REQUIRE(rule.top_k >= 1 && rule.top_k <= std::min(rule.num_experts, kMaxRouterChoices),
             "k is {}; with {} experts it must lie in [1, {}]", rule.top_k, rule.num_experts,
             std::min(rule.num_experts, kMaxRouterChoices));
  MC_REQUIRE(
      rule.num_tokens >= 0 && rule.num_pools >= 0 && rule.num_pools < 65536 &&
          (rule.num_tokens == 0 || (rule.num_pools >= 1 && rule.num_tokens % rule.num_pools == 0)),
      "{} tokens do not divide into {} pools, of which there may be 65,535", rule.num_tokens,
      rule.num_pools);
}

int64_t blocks_of_pool(const moe::RouterRule& rule) {
  const int64_t tokens = rule.num_tokens / std::max(int64_t{1}, rule.num_pools);
  return std::clamp(divided_up(tokens, kWarpsOfBlock * kTokensOfWarp), int64_t{1},
                    kMostBlocksOfPool);
}

// Calls body.operator()<kPerLane>() for as many experts per lane as there are.
template <int kPerLane = 1, typename Body>
void with_experts(int64_t num_experts, const Body& body) {
  if constexpr (kPerLane * kWarp < kMaxRouterExperts) {
    if (num_experts > kPerLane * kWarp) {
      return with_experts<2 * kPerLane>(num_experts, body);
    }
  }
  body.template operator()<kPerLane>();
}

}  // namespace

int64_t route_workspace_numel(const moe::RouterRule& rule) {
  return 1 +
         rule.num_pools * (chunks_of(rule) + 1 + blocks_of_pool(rule) * (2 * rule.num_experts + 1));
}

void route(const RouteParams& params, cudaStream_t stream) {
  const moe::RouterRule& rule = params.rule;
  require_rule(rule);
  const bool has_sums = params.routed.sums.losses != nullptr;
  if (rule.num_pools == 0) {
    if (has_sums) {
      check(cudaMemsetAsync(params.routed.sums.losses, 0, 2 * sizeof(float), stream),
            "clearing the losses of route");
    }
    return;
  }
  with_experts(rule.num_experts, [&]<int kPerLane>() {
    launch("route", route_kernel<kPerLane>,
           {.blocks = blocks_of_pool(rule), .threads = kRowThreads, .block_rows = rule.num_pools},
           stream, params);
  });
  if (has_sums) {
    launch("route", sums_kernel,
           {.blocks = chunks_of(rule), .threads = kRowThreads, .block_rows = rule.num_pools},
           stream, params, blocks_of_pool(rule));
  }
}

void route_backward(const RouteBackwardParams& params, cudaStream_t stream) {
  require_rule(params.rule);
  if (params.rule.num_tokens == 0) {
    return;
  }
  with_experts(params.rule.num_experts, [&]<int kPerLane>() {
    launch("route_backward", route_backward_kernel<kPerLane>,
           {.blocks = divided_up(params.rule.num_tokens, kWarpsOfBlock), .threads = kRowThreads},
           stream, params);
  });
}

}  // namespace megacore::cuda
