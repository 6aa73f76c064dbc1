#include "megacore/layers/attention.h"

#include "cpu.h"

namespace megacore::ops {
namespace {

// Elements of a token must be neighbours.
Tensor with_whole_tokens(Tensor tensor) {
  return tensor.size(3) == 1 || tensor.strides()[3] == 1 ? std::move(tensor)
                                                         : contiguous(std::move(tensor));
}

layers::HeadStrides strides_of(const Tensor& tensor) {
  const std::span<const int64_t> strides = tensor.strides();
  return {.batch = strides[0], .head = strides[1], .token = strides[2]};
}

layers::HeadsSource source_of(const Tensor& tensor) {
  return {{tensor.data<void>(), format_of(tensor.dtype())}, strides_of(tensor)};
}
layers::HeadsTarget target_of(const Tensor& tensor) {
  return {{tensor.mutable_data<void>(), format_of(tensor.dtype())}, strides_of(tensor)};
}

bool has_shape(const Tensor& tensor, std::initializer_list<int64_t> sizes) {
  return std::equal(tensor.sizes().begin(), tensor.sizes().end(), sizes.begin(), sizes.end());
}

layers::AttentionShape checked_shape(
    const Tensor& q, const Tensor& k, const Tensor& v, bool is_causal, double scale) {
  MC_REQUIRE(q.dim() == 4 && k.dim() == 4 && v.dim() == 4,
             "q, k and v must have 4 axes, got {}, {} and {}", shape_text(q), shape_text(k),
             shape_text(v));
  const layers::AttentionShape shape = {.batch = q.size(0),
                                        .heads = q.size(1),
                                        .key_heads = k.size(1),
                                        .queries = q.size(2),
                                        .keys = k.size(2),
                                        .dim = q.size(3),
                                        .value_dim = v.size(3),
                                        .scale = static_cast<float>(scale),
                                        .is_causal = is_causal};
  const auto is_empty = [](const Tensor& tensor) {
    return std::ranges::find(tensor.sizes(), 0) != tensor.sizes().end();
  };
  MC_REQUIRE(!is_empty(q) && !is_empty(k) && !is_empty(v),
             "q, k and v must have elements, got {}, {} and {}", shape_text(q), shape_text(k),
             shape_text(v));
  MC_REQUIRE(has_shape(k, {shape.batch, shape.key_heads, shape.keys, shape.dim}) &&
                 has_shape(v, {shape.batch, shape.key_heads, shape.keys, shape.value_dim}) &&
                 shape.heads % shape.key_heads == 0,
             "k {} and v {} do not fit q {}", shape_text(k), shape_text(v), shape_text(q));
  MC_REQUIRE(std::max(shape.dim, shape.value_dim) <= layers::kMaxHeadDim,
             "dimensions of heads must be at most {}, got {} and {}", layers::kMaxHeadDim,
             shape.dim, shape.value_dim);
  MC_REQUIRE(scale >= 0.0, "scale must be at least 0, got {}", scale);
  return shape;
}

void check_dtypes(const Tensor& q, std::initializer_list<const Tensor*> others) {
  MC_REQUIRE(
      q.dtype() == kDTypes.float32 || q.dtype() == kDTypes.bfloat16 || q.dtype() == kDTypes.float16,
      "q must be float32, bfloat16 or float16");
  for (const Tensor* other : others) {
    MC_REQUIRE(other->dtype() == q.dtype(), "all operands must have the dtype of q");
  }
}

}  // namespace

std::tuple<Tensor, Tensor> attention(Tensor q, Tensor k, Tensor v, bool is_causal, double scale) {
  const layers::AttentionShape shape = checked_shape(q, k, v, is_causal, scale);
  check_dtypes(q, {&k, &v});
  q = with_whole_tokens(std::move(q));
  k = with_whole_tokens(std::move(k));
  v = with_whole_tokens(std::move(v));
  const std::array sizes = {shape.batch, shape.heads, shape.queries, shape.value_dim};
  Tensor mixed = empty_in_order_of(q, sizes, q.dtype());
  Tensor lse = empty({shape.batch, shape.heads, shape.queries}, kDTypes.float32);
  layers::attention(shape, source_of(q), source_of(k), source_of(v), target_of(mixed),
                    lse.mutable_data<float>(), num_threads());
  return {std::move(mixed), std::move(lse)};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(Tensor grad,
                                                      Tensor q,
                                                      Tensor k,
                                                      Tensor v,
                                                      Tensor mixed,
                                                      Tensor lse,
                                                      bool is_causal,
                                                      double scale) {
  const layers::AttentionShape shape = checked_shape(q, k, v, is_causal, scale);
  check_dtypes(q, {&grad, &k, &v, &mixed});
  const std::initializer_list<int64_t> sizes = {shape.batch, shape.heads, shape.queries,
                                                shape.value_dim};
  MC_REQUIRE(has_shape(grad, sizes) && has_shape(mixed, sizes),
             "grad {} and mixed {} do not fit q {} and v {}", shape_text(grad), shape_text(mixed),
             shape_text(q), shape_text(v));
  MC_REQUIRE(
      has_shape(lse, {shape.batch, shape.heads, shape.queries}) && lse.dtype() == kDTypes.float32,
      "lse must be ({}, {}, {}) float32, got {}", shape.batch, shape.heads, shape.queries,
      shape_text(lse));
  grad = with_whole_tokens(std::move(grad));
  q = with_whole_tokens(std::move(q));
  k = with_whole_tokens(std::move(k));
  v = with_whole_tokens(std::move(v));
  mixed = with_whole_tokens(std::move(mixed));
  lse = contiguous(std::move(lse));
  Tensor grad_q = empty_in_order_of(q, q.sizes(), q.dtype());
  Tensor grad_k = empty_in_order_of(k, k.sizes(), k.dtype());
  Tensor grad_v = empty_in_order_of(v, v.sizes(), v.dtype());
  const layers::AttentionPass pass = {.grad = source_of(grad),
                                      .q = source_of(q),
                                      .k = source_of(k),
                                      .v = source_of(v),
                                      .mixed = source_of(mixed),
                                      .lse = lse.data<float>()};
  layers::attention_backward(shape, pass, target_of(grad_q), target_of(grad_k), target_of(grad_v),
                             num_threads());
  return {std::move(grad_q), std::move(grad_k), std::move(grad_v)};
}

}  // namespace megacore::ops
