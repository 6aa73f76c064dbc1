// The arithmetic of one AdamW element, shared by the CPU and the CUDA kernel.
//
// Both must return identical bits, so every operation is a single fp32 rounding in a fixed order.
// This holds only without contraction into fused multiply-adds: the files that use this header are
// compiled with -ffp-contract=off (host) and --fmad=false (device).

#pragma once

#include <cmath>

#include "megacore/base/host_device.h"
#include "megacore/base/low_precision.h"
#include "megacore/buffer/step_control.h"

namespace megacore::buffer {

// Bits of the low-precision copy of a parameter for training.
MC_HOST_DEVICE uint16_t copied_bits(float param, bool is_float16) {
  return is_float16 ? base::float16_bits(param) : base::bfloat16_bits(param);
}

// Settings of a step, from the caller.
struct AdamWOptions {
  double lr = 0.0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;      // decoupled: each step scales the parameter by 1 - lr * this
  double bias_correction1 = 1.0;  // 1 - beta1^step, step counted from 1
  double bias_correction2 = 1.0;  // 1 - beta2^step
  double grad_scale = 1.0;        // multiplies every gradient first (clipping)
};

// The settings as factors of one element; computed in fp64, rounded once.
struct AdamWScalars {
  float grad_scale;
  float decay;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float inv_sqrt_bias2;
  float eps;
  float step_size;
};

struct AdamWElement {
  float param;
  float exp_avg;
  float exp_avg_sq;
};

MC_HOST_DEVICE AdamWScalars adamw_scalars(const AdamWOptions& options) {
  return {
      .grad_scale = static_cast<float>(options.grad_scale),
      .decay = static_cast<float>(1.0 - options.lr * options.weight_decay),
      .one_minus_beta1 = static_cast<float>(1.0 - options.beta1),
      .beta2 = static_cast<float>(options.beta2),
      .one_minus_beta2 = static_cast<float>(1.0 - options.beta2),
      .inv_sqrt_bias2 = static_cast<float>(1.0 / sqrt(options.bias_correction2)),
      .eps = static_cast<float>(options.eps),
      .step_size = static_cast<float>(options.lr / options.bias_correction1),
  };
}

// The options of a step after the decision in `control`, whose learning rate is multiplied in.
MC_HOST_DEVICE AdamWOptions controlled(AdamWOptions options, const StepControl& control) {
  options.lr = control.lr * options.lr;
  options.grad_scale = control.grad_scale;
  options.bias_correction1 = control.bias_correction1;
  options.bias_correction2 = control.bias_correction2;
  return options;
}

// One step of one element, as in torch.optim.AdamW (amsgrad off):
//   g = grad * grad_scale;  m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g^2
//   p = p * (1 - lr * weight_decay) - lr / bias1 * m / (sqrt(v / bias2) + eps)
// Source: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2.
MC_HOST_DEVICE AdamWElement adamw_element(AdamWElement now, float grad, const AdamWScalars& s) {
  const float g = grad * s.grad_scale;
  const float exp_avg = now.exp_avg + s.one_minus_beta1 * (g - now.exp_avg);
  const float exp_avg_sq = s.beta2 * now.exp_avg_sq + s.one_minus_beta2 * (g * g);
  const float denominator = sqrtf(exp_avg_sq) * s.inv_sqrt_bias2 + s.eps;
  const float param = now.param * s.decay - s.step_size * (exp_avg / denominator);
  return {param, exp_avg, exp_avg_sq};
}

}  // namespace megacore::buffer
