#include "megacore/moe/router.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "megacore/base/check.h"
#include "megacore/base/exponential.h"
#include "megacore/base/parallel_for.h"
#include "megacore/base/vector_clones.h"
#include "megacore/moe/permutation.h"

namespace megacore::moe {
namespace {

constexpr float kTiny = 1e-20F;  // as in DeepSeek-V3; far below any sum of softmax scores
// Scores that are worth a thread.
constexpr int64_t kScoresOfThread = 1 << 14;

MC_VECTOR_CLONES_V4 void exponentials(const float* logits,
                                      float highest,
                                      float* __restrict__ out,
                                      int64_t count) {
  for (int64_t e = 0; e < count; ++e) {
    out[e] = base::exponential(logits[e] - highest);
  }
}

MC_VECTOR_CLONES_V4 void sigmoids(const float* logits, float* __restrict__ out, int64_t count) {
  for (int64_t e = 0; e < count; ++e) {
    out[e] = 1.0F / (1.0F + base::exponential(-logits[e]));
  }
}

float sum_of(const float* x, int64_t count) {
  float sum = 0.0F;
  for (int64_t i = 0; i < count; ++i) {
    sum += x[i];
  }
  return sum;
}

float dot_of(const float* x, const float* y, int64_t count) {
  float sum = 0.0F;
  for (int64_t i = 0; i < count; ++i) {
    sum += x[i] * y[i];
  }
  return sum;
}

void divide(float* x, float divisor, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    x[i] /= divisor;
  }
}

struct Partition {
  float highest;
  float sum;  // of the exponentials of the differences to the highest

  float log() const { return highest + std::log(sum); }
};

Partition softmax_row(const float* logits, float* out, int64_t count) {
  const float highest = *std::max_element(logits, logits + count);
  exponentials(logits, highest, out, count);
  const float sum = sum_of(out, count);
  divide(out, sum, count);
  return {highest, sum};
}

void score_row(const RouterRule& rule, const float* logits, float* scores) {
  if (rule.is_sigmoid) {
    sigmoids(logits, scores, rule.num_experts);
  } else {
    softmax_row(logits, scores, rule.num_experts);
  }
}

// Weights of the chosen before scaling; returns what they were divided by.
float weigh_row(const RouterRule& rule,
                const float* logits,
                const float* scores,
                const int64_t* ids,
                float* weights) {
  for (int64_t j = 0; j < rule.top_k; ++j) {
    weights[j] = (rule.softmax_after_top_k ? logits : scores)[ids[j]];
  }
  if (rule.softmax_after_top_k) {
    softmax_row(weights, weights, rule.top_k);
    return 1.0F;
  }
  const float divisor = rule.normalize ? sum_of(weights, rule.top_k) + kTiny : 1.0F;
  divide(weights, divisor, rule.top_k);
  return divisor;
}

void check_rule(const RouterRule& rule, int num_threads) {
  MC_REQUIRE(rule.num_tokens >= 0, "num_tokens must be at least 0, got {}", rule.num_tokens);
  MC_REQUIRE(rule.top_k >= 1 && rule.top_k <= rule.num_experts,
             "k must be 1 to {}, the number of experts, got {}", rule.num_experts, rule.top_k);
  MC_REQUIRE(rule.num_tokens == 0 || (rule.num_pools >= 1 && rule.num_tokens % rule.num_pools == 0),
             "num_pools must be at least 1 and divide {} tokens, got {}", rule.num_tokens,
             rule.num_pools);
  MC_REQUIRE(num_threads >= 1, "num_threads must be at least 1, got {}", num_threads);
}

int64_t tokens_of_thread(const RouterRule& rule) {
  return std::max(int64_t{1}, kScoresOfThread / rule.num_experts);
}

using Floats = std::vector<float>;

Floats floats(int64_t count) { return Floats(static_cast<size_t>(count)); }

// Sums over tokens, from `scores` (T, E) and the log of each token's partition function, which the
// z-loss needs.
void add_up(const RouterRule& rule,
            const Floats& scores,
            const Floats& log_sum_exps,
            const Routed& routed) {
  const int64_t experts = rule.num_experts;
  const RouterSums& sums = routed.sums;
  float* const counts = sums.stats;
  float* const totals = sums.stats + rule.num_pools * experts;
  std::fill_n(sums.stats, 2 * rule.num_pools * experts, 0.0F);
  for (int64_t t = 0; t < rule.num_tokens; ++t) {
    const int64_t pool = t % rule.num_pools * experts;
    for (int64_t e = 0; e < experts; ++e) {
      totals[pool + e] += scores[static_cast<size_t>(t * experts + e)];
    }
    for (int64_t j = 0; j < rule.top_k; ++j) {
      const int64_t expert = routed.ids[t * rule.top_k + j];
      counts[pool + expert] += 1.0F;
      if (sums.seen != nullptr) {
        ++sums.seen[expert];
      }
    }
  }
  double aux = 0.0;
  for (int64_t i = 0; i < rule.num_pools * experts; ++i) {
    aux += static_cast<double>(counts[i]) * static_cast<double>(totals[i]);
  }
  double squares = 0.0;
  for (const float log : log_sum_exps) {
    squares += static_cast<double>(log) * static_cast<double>(log);
  }
  sums.losses[0] = static_cast<float>(aux * static_cast<double>(sums.scales.aux));
  sums.losses[1] = static_cast<float>(squares * static_cast<double>(sums.scales.z));
}

// Gradients of the sums of scores in the pool of a token.
void grad_of_totals(const RouterRule& rule, const RouterGrads& grads, int64_t token, float* grad) {
  if (grads.aux.values == nullptr) {
    std::fill_n(grad, rule.num_experts, 0.0F);
    return;
  }
  const float slope = grads.aux_slope(token, rule.num_pools);
  const float* const counts = grads.counts + token % rule.num_pools * rule.num_experts;
  for (int64_t e = 0; e < rule.num_experts; ++e) {
    grad[e] = slope * counts[e];
  }
}

// Turns `grad` (E) from the gradients of the sums of scores, with those of the weights, into those
// of the scores.
void grad_of_scores(const RouterRule& rule,
                    const float* grad_probs,
                    bool has_totals,
                    const float* scores,
                    const int64_t* ids,
                    const float* weights,
                    float divisor,
                    float* grad) {
  if (rule.is_sigmoid && has_totals) {
    const float sum = sum_of(scores, rule.num_experts) + kTiny;
    const float radial = dot_of(grad, scores, rule.num_experts) / sum;
    for (int64_t e = 0; e < rule.num_experts; ++e) {
      grad[e] = (grad[e] - radial) / sum;
    }
  }
  if (rule.softmax_after_top_k) {
    return;
  }
  const float radial = rule.normalize ? dot_of(grad_probs, weights, rule.top_k) : 0.0F;
  for (int64_t j = 0; j < rule.top_k; ++j) {
    grad[ids[j]] += rule.scaling * (grad_probs[j] - radial) / divisor;
  }
}

// Adds the gradient of the z-loss. `scratch` has room for all experts.
void add_grad_of_z(const RouterRule& rule,
                   const RouterGrads& grads,
                   int64_t token,
                   const float* logits,
                   float* grad_logits,
                   float* scratch) {
  const Partition partition = softmax_row(logits, scratch, rule.num_experts);
  const float slope = grads.z_slope(token, partition.log());
  for (int64_t e = 0; e < rule.num_experts; ++e) {
    grad_logits[e] += slope * scratch[e];
  }
}

void backward_row(const RouterRule& rule,
                  const RouterGrads& grads,
                  int64_t token,
                  const float* logits,
                  const int64_t* ids,
                  float* grad_logits,
                  Floats& scratch) {
  const float* const grad_probs = grads.probs + token * rule.top_k;
  const bool has_totals = grads.aux.values != nullptr;
  float* scores = scratch.data();
  float* grad = scores + rule.num_experts;
  float* weights = grad + rule.num_experts;
  score_row(rule, logits, scores);
  const float divisor = weigh_row(rule, logits, scores, ids, weights);
  grad_of_totals(rule, grads, token, grad);
  grad_of_scores(rule, grad_probs, has_totals, scores, ids, weights, divisor, grad);
  const float radial = rule.is_sigmoid ? 0.0F : dot_of(grad, scores, rule.num_experts);
  for (int64_t e = 0; e < rule.num_experts; ++e) {
    const float slope = rule.is_sigmoid ? 1.0F - scores[e] : 1.0F;
    grad_logits[e] = scores[e] * slope * (grad[e] - radial);
  }
  if (rule.softmax_after_top_k) {
    const float mean = dot_of(grad_probs, weights, rule.top_k);
    for (int64_t j = 0; j < rule.top_k; ++j) {
      grad_logits[ids[j]] += rule.scaling * weights[j] * (grad_probs[j] - mean);
    }
  }
  if (grads.z.values != nullptr) {
    add_grad_of_z(rule, grads, token, logits, grad_logits, grad);
  }
}

}  // namespace

void route(const float* logits,
           const float* bias,
           bool keeps_ids,
           const RouterRule& rule,
           const Routed& routed,
           int num_threads) {
  check_rule(rule, num_threads);
  const int64_t experts = rule.num_experts;
  const bool has_sums = routed.sums.losses != nullptr;
  const bool has_z = has_sums && routed.sums.scales.z != 0.0F;
  Floats scores = floats(rule.num_tokens * experts);
  Floats log_sum_exps = floats(has_z ? rule.num_tokens : 0);
  const auto run = [&](int64_t begin, int64_t end) {
    Floats ranked = floats(experts);
    for (int64_t t = begin; t < end; ++t) {
      float* mine = scores.data() + t * experts;
      int64_t* ids = routed.ids + t * rule.top_k;
      float* probs = routed.probs + t * rule.top_k;
      score_row(rule, logits + t * experts, mine);
      if (!keeps_ids) {
        std::copy_n(rule.softmax_after_top_k ? logits + t * experts : mine, experts, ranked.data());
        for (int64_t e = 0; bias != nullptr && e < experts; ++e) {
          ranked[static_cast<size_t>(e)] += bias[e];
        }
        top_k(ranked.data(), 1, experts, rule.top_k, ids, 1);
      }
      weigh_row(rule, logits + t * experts, mine, ids, probs);
      for (int64_t j = 0; j < rule.top_k; ++j) {
        probs[j] *= rule.scaling;
      }
      if (has_sums && rule.is_sigmoid) {
        divide(mine, sum_of(mine, experts) + kTiny, experts);
      }
      if (has_z) {
        log_sum_exps[static_cast<size_t>(t)] =
            softmax_row(logits + t * experts, ranked.data(), experts).log();
      }
    }
  };
  base::parallel_for(rule.num_tokens, tokens_of_thread(rule), num_threads, run);
  if (has_sums) {
    add_up(rule, scores, log_sum_exps, routed);
  }
}

void route_backward(const RouterGrads& grads,
                    const float* logits,
                    const int64_t* ids,
                    float* grad_logits,
                    const RouterRule& rule,
                    int num_threads) {
  check_rule(rule, num_threads);
  const int64_t experts = rule.num_experts;
  const auto run = [&](int64_t begin, int64_t end) {
    Floats scratch = floats(2 * experts + rule.top_k);
    for (int64_t t = begin; t < end; ++t) {
      backward_row(rule, grads, t, logits + t * experts, ids + t * rule.top_k,
                   grad_logits + t * experts, scratch);
    }
  };
  base::parallel_for(rule.num_tokens, tokens_of_thread(rule), num_threads, run);
}

}  // namespace megacore::moe
