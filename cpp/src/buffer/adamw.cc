#include "megacore/buffer/adamw.h"

#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>

#include "megacore/base/check.h"
#include "megacore/base/intmath.h"

// One build serves every x86-64: the loader picks the widest vectors the processor has. Sanitizer
// builds use one version only, since their runtime is not ready when the loader chooses.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define MC_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MC_VECTOR_CLONES
#endif

namespace megacore::buffer {
namespace {

// A thread costs some 20 us to start and join, the time of about this many elements.
constexpr int64_t kMinNumelPerThread = 1 << 16;

// Elements per 64-byte cache line: threads do not share a line.
constexpr int64_t kLineNumel = 16;

// The pointers are parameters so that __restrict__ counts: without it the loops do not vectorise.
MC_VECTOR_CLONES void step_fp32(float* __restrict__ param,
                                const float* __restrict__ grad,
                                float* __restrict__ exp_avg,
                                float* __restrict__ exp_avg_sq,
                                int64_t numel,
                                const AdamWScalars& scalars) {
  const AdamWScalars s = scalars;
  for (int64_t i = 0; i < numel; ++i) {
    const AdamWElement next = adamw_element({param[i], exp_avg[i], exp_avg_sq[i]}, grad[i], s);
    param[i] = next.param;
    exp_avg[i] = next.exp_avg;
    exp_avg_sq[i] = next.exp_avg_sq;
  }
}

MC_VECTOR_CLONES void round_to_bf16(const float* __restrict__ values,
                                    uint16_t* __restrict__ bits,
                                    int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    bits[i] = bfloat16_bits(values[i]);
  }
}

void step_range(const AdamWTensors& t, int64_t start, int64_t end, const AdamWScalars& scalars) {
  // Rounding follows block by block, while the new parameters are still in the cache.
  const int64_t block = t.param_bf16 == nullptr ? end - start : int64_t{4096};
  for (int64_t at = start; at < end; at += block) {
    const int64_t numel = std::min(block, end - at);
    step_fp32(t.param + at, t.grad + at, t.exp_avg + at, t.exp_avg_sq + at, numel, scalars);
    if (t.param_bf16 != nullptr) {
      round_to_bf16(t.param + at, t.param_bf16 + at, numel);
    }
  }
}

void check_step(const AdamWTensors& t, const AdamWOptions& options, int num_threads) {
  MC_REQUIRE(t.numel >= 0, "numel is ", t.numel, "; it cannot be negative");
  const bool complete =
      t.param != nullptr && t.grad != nullptr && t.exp_avg != nullptr && t.exp_avg_sq != nullptr;
  MC_REQUIRE(complete || t.numel == 0, "a tensor is missing for ", t.numel, " elements");
  MC_REQUIRE(num_threads >= 1, "num_threads is ", num_threads, "; it must be at least 1");
  MC_REQUIRE(
      options.beta1 >= 0.0 && options.beta1 < 1.0 && options.beta2 >= 0.0 && options.beta2 < 1.0,
      "betas are ",
      options.beta1,
      " and ",
      options.beta2,
      "; they must lie in [0, 1)");
  MC_REQUIRE(options.bias_correction1 > 0.0 && options.bias_correction2 > 0.0,
             "bias corrections are ",
             options.bias_correction1,
             " and ",
             options.bias_correction2,
             "; they must be positive (1 - beta^step, with step counted from 1)");
}

}  // namespace

void adamw_step(const AdamWTensors& tensors, const AdamWOptions& options, int num_threads) {
  check_step(tensors, options, num_threads);
  const AdamWScalars scalars = adamw_scalars(options);
  const int64_t useful_threads = std::max(int64_t{1}, tensors.numel / kMinNumelPerThread);
  const int64_t threads = std::min(int64_t{num_threads}, useful_threads);
  const int64_t share = base::align_up(base::ceil_div(tensors.numel, threads), kLineNumel);
  std::vector<std::jthread> helpers;
  for (int64_t start = share; start < tensors.numel; start += share) {
    const int64_t end = std::min(tensors.numel, start + share);
    helpers.emplace_back(
        [&tensors, &scalars, start, end] { step_range(tensors, start, end, scalars); });
  }
  step_range(tensors, 0, std::min(share, tensors.numel), scalars);
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
