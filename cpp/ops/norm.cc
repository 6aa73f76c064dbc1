#include "arguments.h"
#include "cpu.h"
#include "megacore/layers/dense.h"

namespace megacore::ops {

std::tuple<Tensor, Tensor> rms_norm(Tensor x, Tensor weight, double eps) {
  check_weight(x, weight);
  x = contiguous(std::move(x));
  weight = contiguous(std::move(weight));
  Tensor y = empty_like(x), scale = empty(RowSizes(x).get(), kDTypes.float32);
  for_dtype(x.dtype(), [&]<typename Float>(Float) {
    layers::rms_norm<Float>(x.data<Float>(), nullptr, weight.data<Float>(), static_cast<float>(eps),
                            nullptr, y.mutable_data<Float>(), scale.mutable_data<float>(),
                            scale.numel(), weight.size(0), num_threads());
  });
  return {std::move(y), std::move(scale)};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(Tensor x, Tensor added, Tensor weight, double eps) {
  check_weight(x, weight);
  check_like("added", added, x);
  x = contiguous(std::move(x));
  added = contiguous(std::move(added));
  weight = contiguous(std::move(weight));
  Tensor sum = empty_like(x), y = empty_like(x), scale = empty(RowSizes(x).get(), kDTypes.float32);
  for_dtype(x.dtype(), [&]<typename Float>(Float) {
    layers::rms_norm(x.data<Float>(), added.data<Float>(), weight.data<Float>(),
                     static_cast<float>(eps), sum.mutable_data<Float>(), y.mutable_data<Float>(),
                     scale.mutable_data<float>(), scale.numel(), weight.size(0), num_threads());
  });
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
  grad = contiguous(std::move(grad));
  x = contiguous(std::move(x));
  weight = contiguous(std::move(weight));
  scale = contiguous(std::move(scale));
  grad_sum = contiguous(std::move(grad_sum));
  Tensor grad_x = of_x ? empty_like(x) : empty({0}, x.dtype());
  // Sums over rows are float32.
  Tensor grad_weight = empty({of_weight ? weight.size(0) : 0}, kDTypes.float32);
  for_dtype(x.dtype(), [&]<typename Float>(Float) {
    layers::rms_norm_backward(grad.data<Float>(), data_of<Float>(grad_sum), x.data<Float>(),
                              weight.data<Float>(), scale.data<float>(),
                              of_x ? grad_x.mutable_data<Float>() : nullptr,
                              of_weight ? grad_weight.mutable_data<float>() : nullptr,
                              scale.numel(), weight.size(0), num_threads());
  });
  return {std::move(grad_x), contiguous(std::move(grad_weight), weight.dtype())};
}

}  // namespace megacore::ops
