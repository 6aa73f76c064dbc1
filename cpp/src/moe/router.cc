#include "megacore/moe/router.h"

#include <algorithm>
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

void softmax_row(const float* logits, float* out, int64_t count) {
  exponentials(logits, *std::max_element(logits, logits + count), out, count);
  divide(out, sum_of(out, count), count);
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

void add_to_pools(const RouterRule& rule, const Floats& scores, const Routed& routed) {
  const int64_t experts = rule.num_experts;
  std::fill_n(routed.counts, rule.num_pools * experts, 0.0F);
  std::fill_n(routed.totals, rule.num_pools * experts, 0.0F);
  for (int64_t t = 0; t < rule.num_tokens; ++t) {
    const int64_t pool = t % rule.num_pools * experts;
    for (int64_t e = 0; e < experts; ++e) {
      routed.totals[pool + e] += scores[static_cast<size_t>(t * experts + e)];
    }
    for (int64_t j = 0; j < rule.top_k; ++j) {
      routed.counts[pool + routed.ids[t * rule.top_k + j]] += 1.0F;
    }
  }
}

// grad_scores (E) from the gradients of the weights and of the sums of scores.
void grad_of_scores(const RouterRule& rule,
                    const float* grad_probs,
                    const float* grad_totals,
                    const float* scores,
                    const int64_t* ids,
                    const float* weights,
                    float divisor,
                    float* grad) {
  if (grad_totals == nullptr) {
    std::fill_n(grad, rule.num_experts, 0.0F);
  } else {
    std::copy_n(grad_totals, rule.num_experts, grad);
  }
  if (rule.is_sigmoid && grad_totals != nullptr) {
    const float sum = sum_of(scores, rule.num_experts) + kTiny;
    const float radial = dot_of(grad_totals, scores, rule.num_experts) / sum;
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

void backward_row(const RouterRule& rule,
                  const float* grad_probs,
                  const float* grad_totals,
                  const float* logits,
                  const int64_t* ids,
                  float* grad_logits,
                  Floats& scratch) {
  float* scores = scratch.data();
  float* grad = scores + rule.num_experts;
  float* weights = grad + rule.num_experts;
  score_row(rule, logits, scores);
  const float divisor = weigh_row(rule, logits, scores, ids, weights);
  grad_of_scores(rule, grad_probs, grad_totals, scores, ids, weights, divisor, grad);
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
  Floats scores = floats(rule.num_tokens * experts);
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
      if (rule.is_sigmoid) {
        divide(mine, sum_of(mine, experts) + kTiny, experts);
      }
    }
  };
  base::parallel_for(rule.num_tokens, tokens_of_thread(rule), num_threads, run);
  add_to_pools(rule, scores, routed);
}

void route_backward(const float* grad_probs,
                    const float* grad_totals,
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
      const float* of_totals =
          grad_totals == nullptr ? nullptr : grad_totals + t % rule.num_pools * experts;
      backward_row(rule, grad_probs + t * rule.top_k, of_totals, logits + t * experts,
                   ids + t * rule.top_k, grad_logits + t * experts, scratch);
    }
  };
  base::parallel_for(rule.num_tokens, tokens_of_thread(rule), num_threads, run);
}

}  // namespace megacore::moe
