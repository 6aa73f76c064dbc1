#include "attention_rows.h"

#include <algorithm>

#include "megacore/base/exponential.h"
#include "megacore/base/lane_sum.h"
#include "megacore/base/vector_clones.h"

namespace megacore::layers {
namespace {

using base::kLanes;

[[gnu::always_inline]] inline float largest(const float* values, int64_t count) {
  float lanes[kLanes];
  std::fill_n(lanes, kLanes, -std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const float value = values[i + lane];
      lanes[lane] = value > lanes[lane] ? value : lanes[lane];
    }
  }
  float result = -std::numeric_limits<float>::infinity();
  for (; i < count; ++i) {
    result = values[i] > result ? values[i] : result;
  }
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    result = lanes[lane] > result ? lanes[lane] : result;
  }
  return result;
}

}  // namespace

MC_VECTOR_CLONES_V4 float softmax_row(float* __restrict__ scores,
                                      int64_t count,
                                      float scale,
                                      RowState& state) {
  const float before = state.max;
  const float here = scale * largest(scores, count);
  const float max = here > before ? here : before;
  for (int64_t i = 0; i < count; ++i) {
    scores[i] = base::exponential(scale * scores[i] - max);
  }
  const float factor = base::exponential(before - max);
  state.max = max;
  state.sum =
      state.sum * factor +
      base::sum(count, [scores](int64_t i) __attribute__((always_inline)) { return scores[i]; });
  return factor;
}

MC_VECTOR_CLONES_V4 void scale_row(float* __restrict__ row, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) {
    row[i] *= factor;
  }
}

MC_VECTOR_CLONES_V4 float dot_rows(const float* __restrict__ a,
                                   const float* __restrict__ b,
                                   int64_t count) {
  return base::sum(count, [=](int64_t i) __attribute__((always_inline)) { return a[i] * b[i]; });
}

MC_VECTOR_CLONES_V4 void grad_row(float* __restrict__ scores,
                                  float* __restrict__ grads,
                                  const float* __restrict__ lse,
                                  const float* __restrict__ delta,
                                  float scale,
                                  int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float weight = base::exponential(scale * scores[i] - lse[i]);
    scores[i] = weight;
    grads[i] = weight * (grads[i] - delta[i]) * scale;
  }
}

}  // namespace megacore::layers
