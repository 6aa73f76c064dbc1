#include "arguments.h"
#include "cpu.h"
#include "megacore/moe/router.h"

namespace megacore::ops {
std::tuple<Tensor, Tensor, Tensor, Tensor> route(Tensor logits,
                                                 std::optional<Tensor> bias,
                                                 std::optional<Tensor> chosen,
                                                 std::optional<Tensor> seen,
                                                 int64_t k,
                                                 int64_t num_pools,
                                                 bool is_sigmoid,
                                                 bool softmax_after_top_k,
                                                 bool normalize,
                                                 double scaling,
                                                 bool has_sums,
                                                 double aux_scale,
                                                 double z_scale) {
  const moe::RouterRule rule =
      checked_rule(logits, k, num_pools, is_sigmoid, softmax_after_top_k, normalize, scaling);
  check_route(rule, bias, chosen, seen);
  logits = contiguous(std::move(logits));
  bias = contiguous(std::move(bias), kDTypes.float32);
  Tensor probs = empty({rule.num_tokens, k}, kDTypes.float32);
  Tensor ids = empty({rule.num_tokens, k}, kDTypes.int64);
  if (chosen) {
    check_torch(aoti_torch_copy_(ids.handle(), chosen->handle(), 0), "copy_");
  }
  const int64_t num_sums = has_sums ? 2 : 0;
  Tensor stats = empty({num_sums, num_pools, rule.num_experts}, kDTypes.float32);
  Tensor losses = empty({num_sums}, kDTypes.float32);
  moe::route(logits.data<float>(), data_of<float>(bias), chosen.has_value(), rule,
             {.probs = probs.mutable_data<float>(),
              .ids = ids.mutable_data<int64_t>(),
              .sums = {.stats = stats.mutable_data<float>(),
                       .losses = has_sums ? losses.mutable_data<float>() : nullptr,
                       .seen = seen ? seen->mutable_data<int64_t>() : nullptr,
                       .scales = {.aux = static_cast<float>(aux_scale),
                                  .z = static_cast<float>(z_scale)}}},
             num_threads());
  return {std::move(probs), std::move(ids), std::move(stats), std::move(losses)};
}

Tensor route_backward(Tensor grad_probs,
                      Tensor logits,
                      Tensor ids,
                      std::optional<Tensor> counts,
                      std::optional<Tensor> aux_factor,
                      std::optional<Tensor> z_factor,
                      int64_t num_pools,
                      bool is_sigmoid,
                      bool softmax_after_top_k,
                      bool normalize,
                      double scaling,
                      double aux_scale,
                      double z_scale) {
  MC_REQUIRE(ids.dim() == 2, "ids must be (T, k), got {}", shape_text(ids));
  const moe::RouterRule rule = checked_rule(logits, ids.size(1), num_pools, is_sigmoid,
                                            softmax_after_top_k, normalize, scaling);
  check_route_backward(rule, grad_probs, ids, counts);
  grad_probs = contiguous(std::move(grad_probs));
  logits = contiguous(std::move(logits));
  ids = contiguous(std::move(ids));
  counts = contiguous(std::move(counts));
  aux_factor = contiguous(std::move(aux_factor));
  z_factor = contiguous(std::move(z_factor));
  Tensor grad = empty_like(logits);
  moe::route_backward(
      {.probs = grad_probs.data<float>(),
       .counts = data_of<float>(counts),
       .aux = factors_of("aux_factor", aux_factor, rule.num_tokens),
       .z = factors_of("z_factor", z_factor, rule.num_tokens),
       .scales = {.aux = static_cast<float>(aux_scale), .z = static_cast<float>(z_scale)}},
      logits.data<float>(), ids.data<int64_t>(), grad.mutable_data<float>(), rule, num_threads());
  return grad;
}

}  // namespace megacore::ops
