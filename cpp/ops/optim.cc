#include "arguments.h"
#include "cpu.h"

namespace megacore::ops {

void adamw_step(Tensor param,
                Tensor grad,
                Tensor exp_avg,
                Tensor exp_avg_sq,
                std::optional<Tensor> copy_out,
                std::optional<Tensor> control,
                double lr,
                double beta1,
                double beta2,
                double eps,
                double weight_decay,
                double bias_correction1,
                double bias_correction2,
                double grad_scale) {
  const buffer::AdamWTensors tensors = checked_step(param, grad, exp_avg, exp_avg_sq, copy_out);
  check_control(control);
  buffer::AdamWOptions options = {.lr = lr,
                                  .beta1 = beta1,
                                  .beta2 = beta2,
                                  .eps = eps,
                                  .weight_decay = weight_decay,
                                  .bias_correction1 = bias_correction1,
                                  .bias_correction2 = bias_correction2,
                                  .grad_scale = grad_scale};
  if (const auto* decided = data_of<buffer::StepControl>(control)) {
    if (decided->is_applied == 0.0) {
      return;
    }
    options = controlled(options, *decided);
  }
  buffer::adamw_step(tensors, options, num_threads());
}

void decide_step(Tensor state,
                 Tensor sums,
                 Tensor control,
                 double beta1,
                 double beta2,
                 double clip_grad,
                 double loss_scale_interval,
                 double num_averaged) {
  check_decision(state, sums, control);
  auto& decided = *control.mutable_data<buffer::StepControl>();
  decided = buffer::decide_step(*state.mutable_data<buffer::StepState>(),
                                {.beta1 = beta1,
                                 .beta2 = beta2,
                                 .clip_grad = clip_grad,
                                 .loss_scale_interval = loss_scale_interval,
                                 .num_averaged = num_averaged},
                                *sums.data<buffer::StepSums>(), decided.lr);
}

Tensor sum_of_squares(Tensor values) {
  MC_REQUIRE(values.is_contiguous(), "values {} must be contiguous", shape_text(values));
  values = contiguous(std::move(values), kDTypes.float32);
  Tensor total = empty({}, kDTypes.float64);
  *total.mutable_data<double>() = buffer::sum_of_squares(values.data<float>(), values.numel());
  return total;
}

}  // namespace megacore::ops
