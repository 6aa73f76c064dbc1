#include "megacore/buffer/adamw.h"

#include <algorithm>
#include <cmath>

#include "megacore/base/check.h"
#include "megacore/base/parallel_for.h"
#include "megacore/base/vector_clones.h"

namespace megacore::buffer {
namespace {

// Elements that a thread takes at a time, some 20 us of work. A multiple of a 64-byte line: threads
// do not write to the same one.
constexpr int64_t kBlockNumel = 1 << 16;

// How far ahead to ask for memory, and how much a cache line holds. With four arrays to read and
// three to write, the hardware's own prefetching leaves some 10% of the bandwidth unused.
constexpr int64_t kPrefetchNumel = 256;
constexpr int64_t kLineNumel = 16;

// The pointers are parameters so that __restrict__ counts: without it the loops do not vectorise.
[[gnu::always_inline]] inline void step_span(float* __restrict__ param,
                                             const float* __restrict__ grad,
                                             float* __restrict__ exp_avg,
                                             float* __restrict__ exp_avg_sq,
                                             int64_t numel,
                                             const AdamWScalars& s) {
  for (int64_t i = 0; i < numel; ++i) {
    const AdamWElement next = adamw_element({param[i], exp_avg[i], exp_avg_sq[i]}, grad[i], s);
    param[i] = next.param;
    exp_avg[i] = next.exp_avg;
    exp_avg_sq[i] = next.exp_avg_sq;
  }
}

MC_VECTOR_CLONES void step_fp32(float* __restrict__ param,
                                const float* __restrict__ grad,
                                float* __restrict__ exp_avg,
                                float* __restrict__ exp_avg_sq,
                                int64_t numel,
                                const AdamWScalars& scalars) {
  const AdamWScalars s = scalars;
  int64_t i = 0;
  for (; i + kLineNumel + kPrefetchNumel <= numel; i += kLineNumel) {
    const int64_t ahead = i + kPrefetchNumel;
    __builtin_prefetch(param + ahead, 1);
    __builtin_prefetch(grad + ahead, 0);
    __builtin_prefetch(exp_avg + ahead, 1);
    __builtin_prefetch(exp_avg_sq + ahead, 1);
    step_span(param + i, grad + i, exp_avg + i, exp_avg_sq + i, kLineNumel, s);
  }
  step_span(param + i, grad + i, exp_avg + i, exp_avg_sq + i, numel - i, s);
}

MC_VECTOR_CLONES void round_to_bf16(const float* __restrict__ values,
                                    uint16_t* __restrict__ bits,
                                    int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    bits[i] = copied_bits(values[i], false);
  }
}

MC_VECTOR_CLONES void round_to_fp16(const float* __restrict__ values,
                                    uint16_t* __restrict__ bits,
                                    int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    bits[i] = copied_bits(values[i], true);
  }
}

void step_range(const AdamWTensors& t, int64_t start, int64_t end, const AdamWScalars& scalars) {
  // Rounding follows block by block, while the new parameters are still in the cache.
  const int64_t block = t.copy_out == nullptr ? end - start : int64_t{4096};
  for (int64_t at = start; at < end; at += block) {
    const int64_t numel = std::min(block, end - at);
    step_fp32(t.param + at, t.grad + at, t.exp_avg + at, t.exp_avg_sq + at, numel, scalars);
    if (t.copy_out != nullptr) {
      const auto round = t.copy_is_float16 ? round_to_fp16 : round_to_bf16;
      round(t.param + at, t.copy_out + at, numel);
    }
  }
}

void check_step(const AdamWTensors& t, const AdamWOptions& options, int num_threads) {
  MC_REQUIRE(t.numel >= 0, "numel is {}; it cannot be negative", t.numel);
  const bool complete =
      t.param != nullptr && t.grad != nullptr && t.exp_avg != nullptr && t.exp_avg_sq != nullptr;
  MC_REQUIRE(complete || t.numel == 0, "a tensor is missing for {} elements", t.numel);
  MC_REQUIRE(num_threads >= 1, "num_threads must be at least 1, got {}", num_threads);
  MC_REQUIRE(
      options.beta1 >= 0.0 && options.beta1 < 1.0 && options.beta2 >= 0.0 && options.beta2 < 1.0,
      "betas are {} and {}; they must lie in [0, 1)", options.beta1, options.beta2);
  MC_REQUIRE(options.bias_correction1 > 0.0 && options.bias_correction2 > 0.0,
             "bias corrections are {} and {}; they must be positive (1 - beta^step, with step "
             "counted from 1)",
             options.bias_correction1, options.bias_correction2);
}

}  // namespace

void adamw_step(const AdamWTensors& tensors, const AdamWOptions& options, int num_threads) {
  check_step(tensors, options, num_threads);
  const AdamWScalars scalars = adamw_scalars(options);
  // Blocks go to whoever is free: a core that also has other work takes fewer.
  base::parallel_for(tensors.numel, kBlockNumel, num_threads,
                     [&](int64_t begin, int64_t end) { step_range(tensors, begin, end, scalars); });
}

MC_VECTOR_CLONES double sum_of_squares(const float* values, int64_t numel) {
  // Independent lanes let the loop vectorise without reordering a sum; the lane count is fixed, so
  // every processor adds in the same order.
  constexpr int64_t kLanes = 32;
  double lanes[kLanes] = {};
  const int64_t whole = numel - numel % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      lanes[lane] += value * value;
    }
  }
  for (int64_t i = whole; i < numel; ++i) {
    const double value = values[i];
    lanes[i - whole] += value * value;
  }
  double sum = 0.0;
  for (const double lane : lanes) {
    sum += lane;
  }
  return sum;
}

}  // namespace megacore::buffer
