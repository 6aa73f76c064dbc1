#include "megacore/moe/activations.h"

#include "arguments.h"
#include "cpu.h"

namespace megacore::ops {

using moe::Activation;

template <Activation kKind>
Tensor activate(Tensor x, std::optional<Tensor> probs, std::optional<Tensor> num_rows) {
  const moe::ActivationShape shape = checked_rows(kKind, x, probs, num_rows);
  x = contiguous(std::move(x));
  probs = contiguous(std::move(probs), kDTypes.float32);
  Tensor y = empty({shape.rows, shape.width}, x.dtype(), num_rows ? &x : nullptr);
  for_dtype(x.dtype(), [&]<typename Float>(Float) {
    moe::activate(kKind, x.data<Float>(), data_of<float>(probs), y.mutable_data<Float>(), shape,
                  num_threads());
  });
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
  grad = contiguous(std::move(grad));
  x = contiguous(std::move(x));
  probs = contiguous(std::move(probs), kDTypes.float32);
  const Tensor* partly = num_rows ? &x : nullptr;
  Tensor grad_x = empty(x.sizes(), x.dtype(), partly);
  Tensor grad_probs = empty({probs ? shape.rows : 0}, kDTypes.float32, partly);
  for_dtype(x.dtype(), [&]<typename Float>(Float) {
    moe::activate_backward(kKind, grad.data<Float>(), x.data<Float>(), data_of<float>(probs),
                           grad_x.mutable_data<Float>(), grad_probs.mutable_data<float>(), shape,
                           num_threads());
  });
  return {std::move(grad_x), contiguous(std::move(grad_probs), probs_dtype)};
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
