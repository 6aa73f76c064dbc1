#include "device.h"
#include "megacore/cuda/dense.h"
#include "operations.h"

namespace megacore::ops {
namespace {

struct Normed {
  Tensor y;
  Tensor scale;
};

// REQUIRES: aligned tensors.
Normed normalize(const Device& device,
                 const Tensor& x,
                 const Tensor& weight,
                 double eps,
                 const void* added = nullptr,
                 void* sum = nullptr) {
  Tensor y = device.empty_like(x), scale = device.empty(RowSizes(x).get(), kDTypes.float32);
  cuda::rms_norm({.type = float_type(x),
                  .x = x.data<void>(),
                  .added = added,
                  .weight = weight.data<void>(),
                  .sum = sum,
                  .y = y.mutable_data<void>(),
                  .scale = scale.mutable_data<float>(),
                  .rows = scale.numel(),
                  .width = weight.size(0),
                  .eps = static_cast<float>(eps)},
                 device.stream());
  return {std::move(y), std::move(scale)};
}

}  // namespace

std::tuple<Tensor, Tensor> rms_norm(Tensor x, Tensor weight, double eps) {
  check_weight(x, weight);
  const Device device(x, weight);
  x = device.aligned(std::move(x));
  weight = device.aligned(std::move(weight));
  auto [y, scale] = normalize(device, x, weight, eps);
  return {std::move(y), std::move(scale)};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(Tensor x, Tensor added, Tensor weight, double eps) {
  check_weight(x, weight);
  check_like("added", added, x);
  const Device device(x, added, weight);
  x = device.aligned(std::move(x));
  added = device.aligned(std::move(added));
  weight = device.aligned(std::move(weight));
  Tensor sum = device.empty_like(x);
  auto [y, scale] = normalize(device, x, weight, eps, added.data<void>(), sum.mutable_data<void>());
  return {std::move(sum), std::move(y), std::move(scale)};
}

std::tuple<Tensor, Tensor> rms_norm_backward(Tensor grad,
                                             Tensor x,
                                             Tensor weight,
                                             Tensor scale,
                                             bool of_x,
                                             bool of_weight,
                                             std::optional<Tensor> grad_sum) {
  check_norm_backward(grad, x, weight, scale, grad_sum);
  const Device device(x, grad, weight, scale, grad_sum);
  grad = device.aligned(std::move(grad));
  x = device.aligned(std::move(x));
  weight = device.aligned(std::move(weight));
  scale = device.contiguous(std::move(scale));
  grad_sum = device.aligned(std::move(grad_sum));
  const int64_t rows = scale.numel(), width = weight.size(0);
  Tensor grad_x = of_x ? device.empty_like(x) : device.empty({0}, x.dtype());
  Tensor grad_weight = device.empty({of_weight ? width : 0}, x.dtype());
  const cuda::FloatType type = float_type(x);
  Tensor partial_sums = device.empty(
      {of_weight ? cuda::norm_partial_rows(type, rows, width) : 0, width}, kDTypes.float32);
  cuda::rms_norm_backward({.type = type,
                           .grad_y = grad.data<void>(),
                           .grad_sum = data_of<void>(grad_sum),
                           .x = x.data<void>(),
                           .weight = weight.data<void>(),
                           .scale = scale.data<float>(),
                           .grad_x = of_x ? grad_x.mutable_data<void>() : nullptr,
                           .grad_weight = of_weight ? grad_weight.mutable_data<void>() : nullptr,
                           .partial_sums = partial_sums.mutable_data<float>(),
                           .rows = rows,
                           .width = width},
                          device.stream());
  return {std::move(grad_x), std::move(grad_weight)};
}

}  // namespace megacore::ops
