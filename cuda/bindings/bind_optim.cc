#include <cstdint>
#include <string_view>

#include "bindings.h"
#include "megacore/cuda/optim.h"
#include "megacore/cuda/sum_of_squares.h"

namespace py = pybind11;

namespace megacore::bindings {

void bind_optim(py::module_& module) {
  def_kernel(
      module, "adamw_step",
      [](uintptr_t param, uintptr_t grad, uintptr_t exp_avg, uintptr_t exp_avg_sq,
         uintptr_t copy_out, bool copy_is_float16, int64_t numel, double lr, double beta1,
         double beta2, double eps, double weight_decay, double bias_correction1,
         double bias_correction2, double grad_scale, uintptr_t control, uintptr_t stream) {
        cuda::adamw_step({.param = device_pointer<float>(param),
                          .grad = device_pointer<const float>(grad),
                          .exp_avg = device_pointer<float>(exp_avg),
                          .exp_avg_sq = device_pointer<float>(exp_avg_sq),
                          .copy_out = device_pointer<uint16_t>(copy_out),
                          .copy_is_float16 = copy_is_float16,
                          .numel = numel,
                          .options = {.lr = lr,
                                      .beta1 = beta1,
                                      .beta2 = beta2,
                                      .eps = eps,
                                      .weight_decay = weight_decay,
                                      .bias_correction1 = bias_correction1,
                                      .bias_correction2 = bias_correction2,
                                      .grad_scale = grad_scale},
                          .control = device_pointer<const buffer::StepControl>(control)},
                         stream_handle(stream));
      },
      "param", "grad", "exp_avg", "exp_avg_sq", "copy_out", "copy_is_float16", "numel", "lr",
      "beta1", "beta2", "eps", "weight_decay", "bias_correction1", "bias_correction2", "grad_scale",
      "control", "stream");
  def_kernel(
      module, "decide_step",
      [](uintptr_t state, uintptr_t sums, uintptr_t control, double beta1, double beta2,
         double clip_grad, double loss_scale_interval, double num_averaged, uintptr_t stream) {
        cuda::decide_step(device_pointer<buffer::StepState>(state),
                          device_pointer<const buffer::StepSums>(sums),
                          device_pointer<buffer::StepControl>(control),
                          {.beta1 = beta1,
                           .beta2 = beta2,
                           .clip_grad = clip_grad,
                           .loss_scale_interval = loss_scale_interval,
                           .num_averaged = num_averaged},
                          stream_handle(stream));
      },
      "state", "sums", "control", "beta1", "beta2", "clip_grad", "loss_scale_interval",
      "num_averaged", "stream");
  module.attr("SUM_BLOCKS") = cuda::kSumBlocks;
  def_kernel(
      module, "sum_of_squares",
      [](uintptr_t values, int64_t numel, std::string_view dtype, uintptr_t partial_sums,
         uintptr_t total, uintptr_t stream) {
        cuda::sum_of_squares({.values = device_pointer<const void>(values),
                              .type = float_type(dtype),
                              .numel = numel,
                              .partial_sums = device_pointer<double>(partial_sums),
                              .total = device_pointer<double>(total)},
                             stream_handle(stream));
      },
      "values", "numel", "dtype", "partial_sums", "total", "stream");
}

}  // namespace megacore::bindings
