#include "device.h"
#include "megacore/cuda/dense.h"
#include "operations.h"

namespace megacore::ops {
namespace {

// What the launcher may write, where it only reads.
template <typename T>
T* unwritten(const Tensor& tensor) {
  return const_cast<T*>(tensor.data<T>());
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> split_and_rotate(Tensor qkv,
                                                    Tensor cos,
                                                    Tensor sin,
                                                    int64_t head_dim) {
  const Heads heads = heads_of(qkv, head_dim);
  const layers::HeadShape shape = checked_heads(heads.q, heads.k, cos, sin);
  const Device device(qkv, cos, sin);
  qkv = device.contiguous(std::move(qkv));
  cos = device.contiguous(std::move(cos));
  sin = device.contiguous(std::move(sin));
  Tensor q = device.empty(heads.q, qkv.dtype());
  Tensor k = device.empty(heads.k, qkv.dtype()), v = device.empty(heads.k, qkv.dtype());
  cuda::split_and_rotate({.type = float_type(qkv),
                          .qkv = unwritten<void>(qkv),
                          .q = q.mutable_data<void>(),
                          .k = k.mutable_data<void>(),
                          .v = v.mutable_data<void>(),
                          .cos = cos.data<float>(),
                          .sin = sin.data<float>(),
                          .shape = shape},
                         device.stream());
  return {std::move(q), std::move(k), std::move(v)};
}

Tensor split_and_rotate_backward(
    Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor cos, Tensor sin) {
  check_grads(grad_q, grad_k, grad_v);
  const layers::HeadShape shape = checked_heads(grad_q.sizes(), grad_k.sizes(), cos, sin);
  const Device device(grad_q, grad_k, grad_v, cos, sin);
  grad_q = device.contiguous(std::move(grad_q));
  grad_k = device.contiguous(std::move(grad_k));
  grad_v = device.contiguous(std::move(grad_v));
  cos = device.contiguous(std::move(cos));
  sin = device.contiguous(std::move(sin));
  Tensor grad = device.empty(
      {grad_k.size(0), grad_k.size(1), grad_k.size(2), (shape.q_per_kv + 2) * shape.head_dim},
      grad_q.dtype());
  cuda::split_and_rotate({.type = float_type(grad),
                          .qkv = grad.mutable_data<void>(),
                          .q = unwritten<void>(grad_q),
                          .k = unwritten<void>(grad_k),
                          .v = unwritten<void>(grad_v),
                          .cos = cos.data<float>(),
                          .sin = sin.data<float>(),
                          .shape = shape,
                          .backward = true},
                         device.stream());
  return grad;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_and_rotate(Tensor qkv,
                                                           Tensor q_weight,
                                                           Tensor k_weight,
                                                           Tensor cos,
                                                           Tensor sin,
                                                           int64_t head_dim,
                                                           double eps) {
  const Heads heads = heads_of(qkv, head_dim);
  check_norms(qkv, q_weight, k_weight);
  MC_REQUIRE(q_weight.size(0) == head_dim, "weights of norms must be ({},), got {}", head_dim,
             shape_text(q_weight));
  const layers::HeadShape shape = checked_heads(heads.q, heads.k, cos, sin);
  const Device device(qkv, q_weight, k_weight, cos, sin);
  qkv = device.aligned(std::move(qkv));
  q_weight = device.aligned(std::move(q_weight));
  k_weight = device.aligned(std::move(k_weight));
  cos = device.aligned(std::move(cos));
  sin = device.aligned(std::move(sin));
  Tensor q = device.empty(heads.q, qkv.dtype());
  Tensor k = device.empty(heads.k, qkv.dtype()), v = device.empty(heads.k, qkv.dtype());
  Tensor scale = device.empty({qkv.size(0), qkv.size(1), qkv.size(2), qkv.size(3) / head_dim - 1},
                              kDTypes.float32);
  cuda::norm_and_rotate({.heads = {.type = float_type(qkv),
                                   .qkv = unwritten<void>(qkv),
                                   .q = q.mutable_data<void>(),
                                   .k = k.mutable_data<void>(),
                                   .v = v.mutable_data<void>(),
                                   .cos = cos.data<float>(),
                                   .sin = sin.data<float>(),
                                   .shape = shape},
                         .x = qkv.data<void>(),
                         .q_weight = q_weight.data<void>(),
                         .k_weight = k_weight.data<void>(),
                         .eps = static_cast<float>(eps),
                         .scale = scale.mutable_data<float>()},
                        device.stream());
  return {std::move(q), std::move(k), std::move(v), std::move(scale)};
}

std::tuple<Tensor, Tensor, Tensor> norm_and_rotate_backward(Tensor grad_q,
                                                            Tensor grad_k,
                                                            Tensor grad_v,
                                                            Tensor qkv,
                                                            Tensor q_weight,
                                                            Tensor k_weight,
                                                            Tensor scale,
                                                            Tensor cos,
                                                            Tensor sin,
                                                            bool of_qkv,
                                                            bool of_weights) {
  const layers::HeadShape shape =
      checked_norm_grads(grad_q, grad_k, grad_v, qkv, q_weight, k_weight, scale, cos, sin);
  const Device device(qkv, grad_q, grad_k, grad_v, q_weight, k_weight, scale, cos, sin);
  grad_q = device.aligned(std::move(grad_q));
  grad_k = device.aligned(std::move(grad_k));
  grad_v = device.aligned(std::move(grad_v));
  qkv = device.aligned(std::move(qkv));
  q_weight = device.aligned(std::move(q_weight));
  k_weight = device.aligned(std::move(k_weight));
  scale = device.aligned(std::move(scale));
  cos = device.aligned(std::move(cos));
  sin = device.aligned(std::move(sin));
  const int32_t dtype = qkv.dtype();
  Tensor grad_qkv = of_qkv ? device.empty_like(qkv) : device.empty({0}, dtype);
  const int64_t width = of_weights ? shape.head_dim : 0;
  Tensor of_q = device.empty({width}, dtype), of_k = device.empty({width}, dtype);
  const int64_t num_heads = qkv.numel() / shape.head_dim;
  Tensor partial_sums = device.empty(
      {of_weights ? cuda::norm_rotate_partial_rows(num_heads) : 0, 2 * width}, kDTypes.float32);
  cuda::norm_and_rotate({.heads = {.type = float_type(qkv),
                                   .qkv = of_qkv ? grad_qkv.mutable_data<void>() : nullptr,
                                   .q = unwritten<void>(grad_q),
                                   .k = unwritten<void>(grad_k),
                                   .v = unwritten<void>(grad_v),
                                   .cos = cos.data<float>(),
                                   .sin = sin.data<float>(),
                                   .shape = shape,
                                   .backward = true},
                         .x = qkv.data<void>(),
                         .q_weight = q_weight.data<void>(),
                         .k_weight = k_weight.data<void>(),
                         .scale = unwritten<float>(scale),
                         .grad_q_weight = of_weights ? of_q.mutable_data<void>() : nullptr,
                         .grad_k_weight = of_weights ? of_k.mutable_data<void>() : nullptr,
                         .partial_sums = of_weights ? partial_sums.mutable_data<float>() : nullptr},
                        device.stream());
  return {std::move(grad_qkv), std::move(of_q), std::move(of_k)};
}

}  // namespace megacore::ops
