// Operations on CPU tensors; schemas, derivatives and references are in python/megacore/ops.

#pragma once

#include <tuple>

#include "tensor.h"

namespace megacore::ops {

// The normalized rows (..., H), and the factor of each, (..., 1) float32.
std::tuple<Tensor, Tensor> rms_norm(Tensor x, Tensor weight, double eps);

// The same of x + added, with the sum before them.
std::tuple<Tensor, Tensor, Tensor> add_rms_norm(Tensor x, Tensor added, Tensor weight, double eps);

// Gradients of x and weight, either without elements if it is not wanted.
std::tuple<Tensor, Tensor> rms_norm_backward(Tensor grad,
                                             Tensor x,
                                             Tensor weight,
                                             Tensor scale,
                                             bool of_x,
                                             bool of_weight,
                                             std::optional<Tensor> grad_sum);

}  // namespace megacore::ops
