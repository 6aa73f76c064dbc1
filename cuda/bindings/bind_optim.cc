#include <cstdint>

#include "bindings.h"
#include "megacore/cuda/optim.h"

namespace py = pybind11;

namespace megacore::bindings {

void bind_optim(py::module_& module) {
  module.def(
      "adamw_step",
      [](uintptr_t param,
         uintptr_t grad,
         uintptr_t exp_avg,
         uintptr_t exp_avg_sq,
         uintptr_t param_bf16,
         int64_t numel,
         double lr,
         double beta1,
         double beta2,
         double eps,
         double weight_decay,
         double bias_correction1,
         double bias_correction2,
         double grad_scale,
         uintptr_t stream) {
        cuda::adamw_step({.param = device_pointer<float>(param),
                          .grad = device_pointer<const float>(grad),
                          .exp_avg = device_pointer<float>(exp_avg),
                          .exp_avg_sq = device_pointer<float>(exp_avg_sq),
                          .param_bf16 = device_pointer<uint16_t>(param_bf16),
                          .numel = numel,
                          .scalars = buffer::adamw_scalars({.lr = lr,
                                                            .beta1 = beta1,
                                                            .beta2 = beta2,
                                                            .eps = eps,
                                                            .weight_decay = weight_decay,
                                                            .bias_correction1 = bias_correction1,
                                                            .bias_correction2 = bias_correction2,
                                                            .grad_scale = grad_scale})},
                         stream_handle(stream));
      },
      py::kw_only(),
      py::arg("param"),
      py::arg("grad"),
      py::arg("exp_avg"),
      py::arg("exp_avg_sq"),
      py::arg("param_bf16"),
      py::arg("numel"),
      py::arg("lr"),
      py::arg("beta1"),
      py::arg("beta2"),
      py::arg("eps"),
      py::arg("weight_decay"),
      py::arg("bias_correction1"),
      py::arg("bias_correction2"),
      py::arg("grad_scale"),
      py::arg("stream"),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace megacore::bindings
