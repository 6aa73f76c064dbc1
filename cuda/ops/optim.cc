#include "megacore/cuda/optim.h"

#include "device.h"
#include "megacore/cuda/sum_of_squares.h"
#include "operations.h"

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
  const Device device(param, grad, exp_avg, exp_avg_sq, copy_out, control);
  cuda::adamw_step({.param = tensors.param,
                    .grad = tensors.grad,
                    .exp_avg = tensors.exp_avg,
                    .exp_avg_sq = tensors.exp_avg_sq,
                    .copy_out = tensors.copy_out,
                    .copy_is_float16 = tensors.copy_is_float16,
                    .numel = tensors.numel,
                    .options = {.lr = lr,
                                .beta1 = beta1,
                                .beta2 = beta2,
                                .eps = eps,
                                .weight_decay = weight_decay,
                                .bias_correction1 = bias_correction1,
                                .bias_correction2 = bias_correction2,
                                .grad_scale = grad_scale},
                    .control = data_of<buffer::StepControl>(control)},
                   device.stream());
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
  const Device device(state, sums, control);
  cuda::decide_step(state.mutable_data<buffer::StepState>(), sums.data<buffer::StepSums>(),
                    control.mutable_data<buffer::StepControl>(),
                    {.beta1 = beta1,
                     .beta2 = beta2,
                     .clip_grad = clip_grad,
                     .loss_scale_interval = loss_scale_interval,
                     .num_averaged = num_averaged},
                    device.stream());
}

Tensor sum_of_squares(Tensor values) {
  MC_REQUIRE(values.is_contiguous(), "values {} must be contiguous", shape_text(values));
  const Device device(values);
  Tensor total = device.empty({}, kDTypes.float64);
  Tensor partial_sums = device.empty({cuda::kSumBlocks}, kDTypes.float64);
  cuda::sum_of_squares({.values = values.data<void>(),
                        .type = float_type(values),
                        .numel = values.numel(),
                        .partial_sums = partial_sums.mutable_data<double>(),
                        .total = total.mutable_data<double>()},
                       device.stream());
  return total;
}

}  // namespace megacore::ops
