#include "device.h"
#include "megacore/cuda/router.h"
#include "operations.h"

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
  const Device device(logits, bias, chosen, seen);
  logits = device.contiguous(std::move(logits));
  bias = device.contiguous(std::move(bias), kDTypes.float32);
  Tensor probs = device.empty({rule.num_tokens, k}, kDTypes.float32);
  Tensor ids = device.empty({rule.num_tokens, k}, kDTypes.int64);
  if (chosen) {
    check_torch(aoti_torch_copy_(ids.handle(), chosen->handle(), 0), "copy_");
  }
  const int64_t num_sums = has_sums ? 2 : 0;
  Tensor stats = device.empty({num_sums, num_pools, rule.num_experts}, kDTypes.float32);
  Tensor losses = device.empty({num_sums}, kDTypes.float32);
  Tensor workspace =
      device.empty({has_sums ? cuda::route_workspace_numel(rule) : 0}, kDTypes.float32);
  cuda::route({.logits = logits.data<float>(),
               .bias = data_of<float>(bias),
               .keeps_ids = chosen.has_value(),
               .rule = rule,
               .routed = {.probs = probs.mutable_data<float>(),
                          .ids = ids.mutable_data<int64_t>(),
                          .sums = {.stats = stats.mutable_data<float>(),
                                   .losses = has_sums ? losses.mutable_data<float>() : nullptr,
                                   .seen = seen ? seen->mutable_data<int64_t>() : nullptr,
                                   .scales = {.aux = static_cast<float>(aux_scale),
                                              .z = static_cast<float>(z_scale)}}},
               .workspace = workspace.mutable_data<float>()},
              device.stream());
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
  const Device device(logits, grad_probs, ids, counts, aux_factor, z_factor);
  grad_probs = device.contiguous(std::move(grad_probs));
  logits = device.contiguous(std::move(logits));
  ids = device.contiguous(std::move(ids));
  counts = device.contiguous(std::move(counts));
  aux_factor = device.contiguous(std::move(aux_factor));
  z_factor = device.contiguous(std::move(z_factor));
  Tensor grad = device.empty_like(logits);
  cuda::route_backward({.grads = {.probs = grad_probs.data<float>(),
                                  .counts = data_of<float>(counts),
                                  .aux = factors_of("aux_factor", aux_factor, rule.num_tokens),
                                  .z = factors_of("z_factor", z_factor, rule.num_tokens),
                                  .scales = {.aux = static_cast<float>(aux_scale),
                                             .z = static_cast<float>(z_scale)}},
                        .logits = logits.data<float>(),
                        .ids = ids.data<int64_t>(),
                        .grad_logits = grad.mutable_data<float>(),
                        .rule = rule},
                       device.stream());
  return grad;
}

}  // namespace megacore::ops
