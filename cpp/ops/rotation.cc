#include "arguments.h"
#include "cpu.h"
#include "megacore/layers/dense.h"

namespace megacore::ops {
std::tuple<Tensor, Tensor, Tensor> split_and_rotate(Tensor qkv,
                                                    Tensor cos,
                                                    Tensor sin,
                                                    int64_t head_dim) {
  const Heads heads = heads_of(qkv, head_dim);
  const layers::HeadShape shape = checked_heads(heads.q, heads.k, cos, sin);
  qkv = contiguous(std::move(qkv));
  cos = contiguous(std::move(cos));
  sin = contiguous(std::move(sin));
  Tensor q = empty(heads.q, qkv.dtype());
  Tensor k = empty(heads.k, qkv.dtype()), v = empty(heads.k, qkv.dtype());
  for_dtype(qkv.dtype(), [&]<typename Float>(Float) {
    layers::split_and_rotate(const_cast<Float*>(qkv.data<Float>()), q.mutable_data<Float>(),
                             k.mutable_data<Float>(), v.mutable_data<Float>(), cos.data<float>(),
                             sin.data<float>(), shape, false, num_threads());
  });
  return {std::move(q), std::move(k), std::move(v)};
}

Tensor split_and_rotate_backward(
    Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor cos, Tensor sin) {
  check_grads(grad_q, grad_k, grad_v);
  const layers::HeadShape shape = checked_heads(grad_q.sizes(), grad_k.sizes(), cos, sin);
  grad_q = contiguous(std::move(grad_q));
  grad_k = contiguous(std::move(grad_k));
  grad_v = contiguous(std::move(grad_v));
  cos = contiguous(std::move(cos));
  sin = contiguous(std::move(sin));
  Tensor grad =
      empty({grad_k.size(0), grad_k.size(1), grad_k.size(2), (shape.q_per_kv + 2) * shape.head_dim},
            grad_q.dtype());
  for_dtype(grad.dtype(), [&]<typename Float>(Float) {
    // The kernel reads the others.
    layers::split_and_rotate(grad.mutable_data<Float>(), const_cast<Float*>(grad_q.data<Float>()),
                             const_cast<Float*>(grad_k.data<Float>()),
                             const_cast<Float*>(grad_v.data<Float>()), cos.data<float>(),
                             sin.data<float>(), shape, true, num_threads());
  });
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
  qkv = contiguous(std::move(qkv));
  q_weight = contiguous(std::move(q_weight));
  k_weight = contiguous(std::move(k_weight));
  cos = contiguous(std::move(cos));
  sin = contiguous(std::move(sin));
  Tensor q = empty(heads.q, qkv.dtype());
  Tensor k = empty(heads.k, qkv.dtype()), v = empty(heads.k, qkv.dtype());
  Tensor scale =
      empty({qkv.size(0), qkv.size(1), qkv.size(2), qkv.size(3) / head_dim - 1}, kDTypes.float32);
  for_dtype(qkv.dtype(), [&]<typename Float>(Float) {
    layers::norm_and_rotate(qkv.data<Float>(),
                            {q_weight.data<Float>(), k_weight.data<Float>(),
                             static_cast<float>(eps), scale.mutable_data<float>()},
                            q.mutable_data<Float>(), k.mutable_data<Float>(),
                            v.mutable_data<Float>(), cos.data<float>(), sin.data<float>(), shape,
                            num_threads());
  });
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
  grad_q = contiguous(std::move(grad_q));
  grad_k = contiguous(std::move(grad_k));
  grad_v = contiguous(std::move(grad_v));
  qkv = contiguous(std::move(qkv));
  q_weight = contiguous(std::move(q_weight));
  k_weight = contiguous(std::move(k_weight));
  scale = contiguous(std::move(scale));
  cos = contiguous(std::move(cos));
  sin = contiguous(std::move(sin));
  const int32_t dtype = qkv.dtype();
  Tensor grad_qkv = of_qkv ? empty_like(qkv) : empty({0}, dtype);
  // Sums over heads are float32.
  const int64_t width = of_weights ? shape.head_dim : 0;
  Tensor of_q = empty({width}, kDTypes.float32), of_k = empty({width}, kDTypes.float32);
  for_dtype(dtype, [&]<typename Float>(Float) {
    const layers::HeadGrads<Float> grads = {
        grad_q.data<Float>(),
        grad_k.data<Float>(),
        grad_v.data<Float>(),
        of_qkv ? grad_qkv.mutable_data<Float>() : nullptr,
        of_weights ? of_q.mutable_data<float>() : nullptr,
        of_weights ? of_k.mutable_data<float>() : nullptr,
    };
    const layers::HeadNorms<Float> norms = {q_weight.data<Float>(), k_weight.data<Float>(), 0.0F,
                                            const_cast<float*>(scale.data<float>())};
    layers::norm_and_rotate_backward(grads, qkv.data<Float>(), norms, cos.data<float>(),
                                     sin.data<float>(), shape, num_threads());
  });
  return {std::move(grad_qkv), contiguous(std::move(of_q), dtype),
          contiguous(std::move(of_k), dtype)};
}

}  // namespace megacore::ops
