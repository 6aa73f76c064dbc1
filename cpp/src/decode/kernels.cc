#include "kernels.h"

#include <algorithm>
#include <cmath>

#include "megacore/base/exponential.h"
#include "megacore/base/parallel_for.h"
#include "megacore/base/vector_clones.h"
#include "megacore/moe/gemm_skinny.h"

namespace megacore::decode {
namespace {

constexpr int64_t kLanes = 16;
// Multiplications that are worth a thread.
constexpr int64_t kGrainNumel = 1 << 19;

[[gnu::always_inline]] inline float sum_of(float* lanes) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

[[gnu::always_inline]] inline float dot(const float* x, const float* y, int64_t count) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += x[i + lane] * y[i + lane];
    }
  }
  float rest = 0.0F;
  for (; i < count; ++i) {
    rest += x[i] * y[i];
  }
  return sum_of(lanes) + rest;
}

MC_VECTOR_CLONES_V4 void score(const Head& head, float* scores) {
  for (int64_t t = 0; t < head.count; ++t) {
    scores[t] = dot(head.query, head.keys + t * head.stride, head.dim) * head.scale;
  }
}

// Turns scores into weights, whose sum it returns without that of the sink.
MC_VECTOR_CLONES_V4 float exponentials(float* scores, int64_t count, float highest) {
  for (int64_t t = 0; t < count; ++t) {
    scores[t] = base::exponential(scores[t] - highest);
  }
  float lanes[kLanes] = {};
  int64_t t = 0;
  for (; t + kLanes <= count; t += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += scores[t + lane];
    }
  }
  for (; t < count; ++t) {
    lanes[0] += scores[t];
  }
  return sum_of(lanes);
}

MC_VECTOR_CLONES_V4 void weighted_sum(const Head& head, const float* weights, float* out) {
  int64_t d = 0;
  for (; d + kLanes <= head.dim; d += kLanes) {
    float lanes[kLanes] = {};
    for (int64_t t = 0; t < head.count; ++t) {
      const float* value = head.values + t * head.stride + d;
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        lanes[lane] += weights[t] * value[lane];
      }
    }
    std::copy_n(lanes, kLanes, out + d);
  }
  for (; d < head.dim; ++d) {
    float sum = 0.0F;
    for (int64_t t = 0; t < head.count; ++t) {
      sum += weights[t] * head.values[t * head.stride + d];
    }
    out[d] = sum;
  }
}

}  // namespace

void attend(const Head& head, float* scores, float* out) {
  score(head, scores);
  if (head.softcap > 0.0F) {
    for (int64_t t = 0; t < head.count; ++t) {
      scores[t] = head.softcap * std::tanh(scores[t] / head.softcap);
    }
  }
  float highest = *std::max_element(scores, scores + head.count);
  highest = head.sink == nullptr ? highest : std::max(highest, *head.sink);
  float sum = exponentials(scores, head.count, highest);
  sum += head.sink == nullptr ? 0.0F : std::exp(*head.sink - highest);
  weighted_sum(head, scores, out);
  for (int64_t d = 0; d < head.dim; ++d) {
    out[d] /= sum;
  }
}

void linear(const float* x,
            const float* weight,
            const float* bias,
            float* y,
            int64_t rows,
            int64_t features,
            int64_t depth,
            int num_threads) {
  const auto run = [&](int64_t begin, int64_t end) {
    moe::skinny_kernels().forward(x, weight + begin * depth, y + begin, rows, end - begin, depth,
                                  features);
  };
  const int64_t grain = std::max(int64_t{4}, kGrainNumel / std::max(int64_t{1}, rows * depth));
  base::parallel_for(features, grain, num_threads, run);
  for (int64_t i = 0; bias != nullptr && i < rows; ++i) {
    for (int64_t n = 0; n < features; ++n) {
      y[i * features + n] += bias[n];
    }
  }
}

}  // namespace megacore::decode
