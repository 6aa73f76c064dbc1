#include "megacore/layers/dropout.h"

#include <algorithm>

#include "megacore/base/check.h"
#include "megacore/base/low_precision.h"
#include "megacore/base/parallel_for.h"
#include "megacore/base/vector_clones.h"

namespace megacore::layers {
namespace {

// Elements that are worth a thread.
constexpr int64_t kGrainOfDropout = 1 << 15;

MC_VECTOR_CLONES_V4 void drop_row(const float* __restrict__ x,
                                  float* __restrict__ y,
                                  uint64_t start,
                                  const DropoutRule& rule) {
  const int64_t threshold = rule.threshold;
  const float factor = rule.factor;
  for (int64_t i = 0; i < rule.width; ++i) {
    y[i] = x[i] * (keeps(start, i, threshold) ? factor : 0.0F);
  }
}

MC_VECTOR_CLONES_V4 void drop_row(const uint16_t* __restrict__ x,
                                  uint16_t* __restrict__ y,
                                  uint64_t start,
                                  const DropoutRule& rule) {
  const int64_t threshold = rule.threshold;
  const float factor = base::float_of_bfloat16(base::bfloat16_bits(rule.factor));
  for (int64_t i = 0; i < rule.width; ++i) {
    const float scale = keeps(start, i, threshold) ? factor : 0.0F;
    y[i] = base::bfloat16_bits(base::float_of_bfloat16(x[i]) * scale);
  }
}

}  // namespace

template <typename Float>
void dropout(const Float* x,
             const int64_t* sample_ids,
             const int64_t* positions,
             int64_t key,
             const DropoutRule& rule,
             Float* y,
             int num_threads) {
  MC_REQUIRE(rule.sequence >= 0 && rule.batch >= 0 && rule.width >= 0,
             "sizes must be at least 0, got {} x {} x {}", rule.sequence, rule.batch, rule.width);
  const int64_t grain = std::max(int64_t{1}, kGrainOfDropout / std::max(int64_t{1}, rule.width));
  base::parallel_for(
      rule.sequence * rule.batch, grain, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
          const uint64_t start =
              start_of_token(key, sample_ids[token % rule.batch], positions[token / rule.batch]);
          drop_row(x + token * rule.width, y + token * rule.width, start, rule);
        }
      });
}

template void dropout<float>(
    const float*, const int64_t*, const int64_t*, int64_t, const DropoutRule&, float*, int);
template void dropout<uint16_t>(
    const uint16_t*, const int64_t*, const int64_t*, int64_t, const DropoutRule&, uint16_t*, int);

}  // namespace megacore::layers
