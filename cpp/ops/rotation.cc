#include "megacore/layers/dense.h"
#include "operations.h"

namespace megacore::ops {
namespace {

// Sizes of q (S, B, G Q, D) and k (S, B, G, D), and tables that fit them.
layers::HeadShape checked_heads(std::span<const int64_t> q,
                                std::span<const int64_t> k,
                                const Tensor& cos,
                                const Tensor& sin) {
  const int64_t sequence = k[0], batch = k[1], groups = k[2], head_dim = k[3];
  const bool per_sample = cos.dim() == 3;
  MC_REQUIRE(cos.dtype() == kDTypes.float32 && sin.dtype() == kDTypes.float32 &&
                 sin.has_sizes_of(cos) && (per_sample || cos.dim() == 2) &&
                 cos.size(0) >= sequence && (!per_sample || cos.size(1) == batch),
             "cos and sin must be float32, ({}, R) or ({}, {}, R), or longer, got {} and {}",
             sequence, sequence, batch, shape_text(cos), shape_text(sin));
  const int64_t num_rotated = 2 * cos.size(cos.dim() - 1);
  MC_REQUIRE(num_rotated <= head_dim, "cos must have at most {} columns, got {}", head_dim / 2,
             num_rotated / 2);
  return {.num_tokens = sequence * batch,
          .batch = batch,
          .num_groups = groups,
          .q_per_kv = q[2] / (groups > 0 ? groups : 1),
          .head_dim = head_dim,
          .num_rotated = num_rotated,
          .position_per_sample = per_sample};
}

struct Heads {
  std::array<int64_t, 4> q;
  std::array<int64_t, 4> k;
};

Heads heads_of(const Tensor& qkv, int64_t head_dim) {
  MC_REQUIRE(
      qkv.dim() == 4 && head_dim > 0 && qkv.size(3) % head_dim == 0 && qkv.size(3) / head_dim >= 2,
      "qkv must be (S, B, G, (Q + 2) {}), got {}", head_dim, shape_text(qkv));
  const int64_t q_per_kv = qkv.size(3) / head_dim - 2;
  return {{qkv.size(0), qkv.size(1), qkv.size(2) * q_per_kv, head_dim},
          {qkv.size(0), qkv.size(1), qkv.size(2), head_dim}};
}

void check_grads(const Tensor& grad_q, const Tensor& grad_k, const Tensor& grad_v) {
  MC_REQUIRE(grad_k.dim() == 4 && grad_v.has_sizes_of(grad_k) && grad_q.dim() == 4 &&
                 grad_q.size(0) == grad_k.size(0) && grad_q.size(1) == grad_k.size(1) &&
                 grad_q.size(3) == grad_k.size(3) && grad_k.size(2) > 0 &&
                 grad_q.size(2) % grad_k.size(2) == 0,
             "gradients of q, k and v do not fit: {}, {} and {}", shape_text(grad_q),
             shape_text(grad_k), shape_text(grad_v));
  MC_REQUIRE(grad_q.dtype() == grad_k.dtype() && grad_v.dtype() == grad_k.dtype(),
             "gradients of q, k and v must have one dtype");
}

void check_norms(const Tensor& qkv, const Tensor& q_weight, const Tensor& k_weight) {
  MC_REQUIRE(q_weight.dim() == 1 && k_weight.has_sizes_of(q_weight),
             "weights of norms must be (D,), got {} and {}", shape_text(q_weight),
             shape_text(k_weight));
  MC_REQUIRE(q_weight.dtype() == qkv.dtype() && k_weight.dtype() == qkv.dtype(),
             "weights of norms must have the dtype of qkv");
}

}  // namespace

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
  check_norms(qkv, q_weight, k_weight);
  check_grads(grad_q, grad_k, grad_v);
  const int64_t head_dim = q_weight.size(0);
  const Heads heads = heads_of(qkv, head_dim);
  MC_REQUIRE(grad_q.dtype() == qkv.dtype() && std::ranges::equal(grad_q.sizes(), heads.q) &&
                 std::ranges::equal(grad_k.sizes(), heads.k),
             "gradients {} and {} must fit qkv {}, with its dtype", shape_text(grad_q),
             shape_text(grad_k), shape_text(qkv));
  const layers::HeadShape shape = checked_heads(heads.q, heads.k, cos, sin);
  MC_REQUIRE(scale.dtype() == kDTypes.float32 &&
                 scale.numel() == shape.num_tokens * shape.num_groups * (shape.q_per_kv + 1),
             "scale must have a float32 number per normalized head, got {}", shape_text(scale));
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
  const int64_t width = of_weights ? head_dim : 0;
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
