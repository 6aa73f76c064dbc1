// Decision of an optimizer step on the device of the gradients: skipping, the factor of gradients,
// and the loss scale of the next step.
//
// A few fp64 numbers, so that a tensor can hold them. The CPU and the CUDA code share this
// function;
// on a GPU there is no host sync before the update.

#pragma once

#include <cmath>
#include <cstdint>

#include "megacore/base/host_device.h"

namespace megacore::buffer {

// State between steps.
struct StepState {
  double step_count;   // updates taken
  double num_skipped;  // steps skipped because of a gradient that was not finite
  double loss_scale;   // a power of two; gradients are multiplied by it
  double good_steps;   // steps since the loss scale last changed
};

// Sums over all ranks of one step.
struct StepSums {
  double squared_norm;   // of the averaged gradients
  double num_nonfinite;  // ranks with a gradient that is not finite
  double num_tokens;     // see StepRules::num_averaged
};

// Constant rules of all steps.
struct StepRules {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double clip_grad = 0.0;  // largest norm; 0: any
  double loss_scale_interval =
      0.0;  // good steps after which the loss scale doubles; 0: it is fixed
  // Number of ranks that averaged the gradients, if these are sums over tokens: they are multiplied
  // by it and divided by num_tokens. 0: gradients are means.
  double num_averaged = 0.0;
};

// Inputs of the update.
struct StepControl {
  double grad_scale;        // multiplies every gradient
  double bias_correction1;  // 1 - beta1^step
  double bias_correction2;  // 1 - beta2^step
  double is_applied;        // 0: the step is skipped
  double grad_norm;         // before clipping; NaN if skipped
  double lr;                // learning rate; the caller's, not decided here
};

constexpr double kLargestLossScale = 16777216.0;  // 2^24

// base^exponent with the same bits on all platforms, which pow does not guarantee.
MC_HOST_DEVICE double whole_power(double base, double exponent) {
  double power = 1.0;
  for (auto left = static_cast<int64_t>(exponent); left > 0; left /= 2) {
    if (left % 2 == 1) {
      power = power * base;
    }
    base = base * base;
  }
  return power;
}

MC_HOST_DEVICE void adapt_loss_scale(StepState& state, const StepRules& rules, bool is_good) {
  if (rules.loss_scale_interval <= 0.0) {
    return;
  }
  if (!is_good) {
    state.good_steps = 0.0;
    state.loss_scale = state.loss_scale > 2.0 ? state.loss_scale / 2.0 : 1.0;
    return;
  }
  state.good_steps = state.good_steps + 1.0;
  if (state.good_steps >= rules.loss_scale_interval) {
    state.good_steps = 0.0;
    state.loss_scale = state.loss_scale * 2.0;
    if (state.loss_scale > kLargestLossScale) {
      state.loss_scale = kLargestLossScale;
    }
  }
}

// Decides one step and updates the state. Skipped steps change neither the step count nor the bias
// corrections.
MC_HOST_DEVICE StepControl decide_step(StepState& state,
                                       const StepRules& rules,
                                       const StepSums& sums,
                                       double lr = 1.0) {
  double scale = 1.0 / state.loss_scale;
  if (rules.num_averaged > 0.0) {
    const double num_tokens = sums.num_tokens > 1.0 ? sums.num_tokens : 1.0;
    scale = scale * (rules.num_averaged / num_tokens);
  }
  const bool is_good = sums.num_nonfinite == 0.0;
  adapt_loss_scale(state, rules, is_good);
  if (is_good) {
    state.step_count = state.step_count + 1.0;
  } else {
    state.num_skipped = state.num_skipped + 1.0;
  }
  const double norm = sqrt(sums.squared_norm) * scale;
  double clip = 1.0;
  if (rules.clip_grad > 0.0 && rules.clip_grad / (norm + 1e-6) < 1.0) {
    clip = rules.clip_grad / (norm + 1e-6);
  }
  return {
      .grad_scale = clip * scale,
      .bias_correction1 = 1.0 - whole_power(rules.beta1, state.step_count),
      .bias_correction2 = 1.0 - whole_power(rules.beta2, state.step_count),
      .is_applied = is_good ? 1.0 : 0.0,
      .grad_norm = is_good ? norm : static_cast<double>(NAN),
      .lr = lr,
  };
}

}  // namespace megacore::buffer
