#include "megacore/cuda/activations.h"

#include "device.h"
#include "operations.h"

namespace megacore::ops {

using moe::Activation;

template <Activation kKind>
Tensor activate(Tensor x, std::optional<Tensor> probs, std::optional<Tensor> num_rows) {
  const moe::ActivationShape shape = checked_rows(kKind, x, probs, num_rows);
  const Device device(x, probs, num_rows);
  x = device.contiguous(std::move(x));
  probs = device.contiguous(std::move(probs), kDTypes.float32);
  Tensor y = device.empty({shape.rows, shape.width}, x.dtype(), num_rows ? &x : nullptr);
  cuda::activate({.kind = kKind,
                  .type = float_type(x),
                  .x = x.data<void>(),
                  .probs = data_of<float>(probs),
                  .y = y.mutable_data<void>(),
                  .num_rows = shape.num_rows,
                  .rows = shape.rows,
                  .width = shape.width},
                 device.stream());
  return y;
}

template <Activation kKind>
std::tuple<Tensor, Tensor> activate_backward(Tensor grad,
                                             Tensor x,
                                             std::optional<Tensor> probs,
                                             std::optional<Tensor> num_rows) {
  const int32_t probs_dtype = probs ? probs->dtype() : kDTypes.float32;
  const moe::ActivationShape shape = checked_rows(kKind, x, probs, num_rows);
  check_activation_grad(grad, x, shape);
  const Device device(x, grad, probs, num_rows);
  grad = device.contiguous(std::move(grad));
  x = device.contiguous(std::move(x));
  probs = device.contiguous(std::move(probs), kDTypes.float32);
  const Tensor* partly = num_rows ? &x : nullptr;
  Tensor grad_x = device.empty(x.sizes(), x.dtype(), partly);
  Tensor grad_probs = device.empty({probs ? shape.rows : 0}, kDTypes.float32, partly);
  cuda::activate_backward({.kind = kKind,
                           .type = float_type(x),
                           .grad_y = grad.data<void>(),
                           .x = x.data<void>(),
                           .probs = data_of<float>(probs),
                           .grad_x = grad_x.mutable_data<void>(),
                           .grad_probs = grad_probs.mutable_data<float>(),
                           .num_rows = shape.num_rows,
                           .rows = shape.rows,
                           .width = shape.width},
                          device.stream());
  return {std::move(grad_x), device.contiguous(std::move(grad_probs), probs_dtype)};
}

template Tensor activate<Activation::kSwiglu>(Tensor, std::optional<Tensor>, std::optional<Tensor>);
template Tensor activate<Activation::kGelu>(Tensor, std::optional<Tensor>, std::optional<Tensor>);
template std::tuple<Tensor, Tensor> activate_backward<Activation::kSwiglu>(Tensor,
                                                                           Tensor,
                                                                           std::optional<Tensor>,
                                                                           std::optional<Tensor>);
template std::tuple<Tensor, Tensor> activate_backward<Activation::kGelu>(Tensor,
                                                                         Tensor,
                                                                         std::optional<Tensor>,
                                                                         std::optional<Tensor>);

}  // namespace megacore::ops
