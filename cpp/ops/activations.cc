#include "megacore/moe/activations.h"

#include "operations.h"

namespace megacore::ops {
namespace {

// Checks the arguments of an activation, and makes numbers per row float32.
moe::ActivationShape checked_rows(moe::Activation kind,
                                  const Tensor& x,
                                  std::optional<Tensor>& probs,
                                  const std::optional<Tensor>& num_rows) {
  const int64_t factor = kind == moe::Activation::kSwiglu ? 2 : 1;
  MC_REQUIRE(x.dim() == 2 && x.size(1) % factor == 0, "x must be (M, {}F), got {}",
             factor == 1 ? "" : "2 ", shape_text(x));
  if (probs) {
    MC_REQUIRE(probs->dim() == 1 && probs->size(0) == x.size(0), "probs must be ({},), got {}",
               x.size(0), shape_text(*probs));
    probs = contiguous(std::move(*probs), kDTypes.float32);
  }
  MC_REQUIRE(!num_rows || (num_rows->dtype() == kDTypes.int64 && num_rows->numel() == 1),
             "num_rows must be an int64 scalar");
  return {x.size(0), x.size(1) / factor, data_of<int64_t>(num_rows)};
}

template <moe::Activation kKind>
Tensor activate(Tensor x, std::optional<Tensor> probs, std::optional<Tensor> num_rows) {
  const moe::ActivationShape shape = checked_rows(kKind, x, probs, num_rows);
  x = contiguous(std::move(x));
  Tensor y = empty({shape.rows, shape.width}, x.dtype(), num_rows ? &x : nullptr);
  for_dtype(x.dtype(), [&]<typename Float>(Float) {
    moe::activate(kKind, x.data<Float>(), data_of<float>(probs), y.mutable_data<Float>(), shape,
                  num_threads());
  });
  return y;
}

template <moe::Activation kKind>
std::tuple<Tensor, Tensor> activate_backward(Tensor grad,
                                             Tensor x,
                                             std::optional<Tensor> probs,
                                             std::optional<Tensor> num_rows) {
  const int32_t probs_dtype = probs ? probs->dtype() : kDTypes.float32;
  const moe::ActivationShape shape = checked_rows(kKind, x, probs, num_rows);
  MC_REQUIRE(grad.dim() == 2 && grad.size(0) == shape.rows && grad.size(1) == shape.width &&
                 grad.dtype() == x.dtype(),
             "grad must be ({}, {}) with the dtype of x, got {}", shape.rows, shape.width,
             shape_text(grad));
  grad = contiguous(std::move(grad));
  x = contiguous(std::move(x));
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

}  // namespace

Tensor swiglu(Tensor x, std::optional<Tensor> probs, std::optional<Tensor> num_rows) {
  return activate<moe::Activation::kSwiglu>(std::move(x), std::move(probs), std::move(num_rows));
}

Tensor gelu(Tensor x, std::optional<Tensor> probs, std::optional<Tensor> num_rows) {
  return activate<moe::Activation::kGelu>(std::move(x), std::move(probs), std::move(num_rows));
}

std::tuple<Tensor, Tensor> swiglu_backward(Tensor grad,
                                           Tensor x,
                                           std::optional<Tensor> probs,
                                           std::optional<Tensor> num_rows) {
  return activate_backward<moe::Activation::kSwiglu>(std::move(grad), std::move(x),
                                                     std::move(probs), std::move(num_rows));
}

std::tuple<Tensor, Tensor> gelu_backward(Tensor grad,
                                         Tensor x,
                                         std::optional<Tensor> probs,
                                         std::optional<Tensor> num_rows) {
  return activate_backward<moe::Activation::kGelu>(std::move(grad), std::move(x), std::move(probs),
                                                   std::move(num_rows));
}

}  // namespace megacore::ops
