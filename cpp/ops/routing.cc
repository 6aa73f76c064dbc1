#include "megacore/moe/router.h"
#include "operations.h"

namespace megacore::ops {
namespace {

moe::RouterRule checked_rule(const Tensor& logits,
                             int64_t k,
                             int64_t num_pools,
                             bool is_sigmoid,
                             bool softmax_after_top_k,
                             bool normalize,
                             double scaling) {
  MC_REQUIRE(logits.dim() == 2 && logits.dtype() == kDTypes.float32,
             "logits must be (T, E) float32, got {}", shape_text(logits));
  MC_REQUIRE(k >= 1 && k <= logits.size(1), "k must be 1 to {}, the number of experts, got {}",
             logits.size(1), k);
  MC_REQUIRE(num_pools >= 0 &&
                 (logits.size(0) == 0 || (num_pools >= 1 && logits.size(0) % num_pools == 0)),
             "num_pools must be at least 1 and divide {} tokens, got {}", logits.size(0),
             num_pools);
  return {logits.size(0), logits.size(1),      k,         num_pools,
          is_sigmoid,     softmax_after_top_k, normalize, static_cast<float>(scaling)};
}

// An optional vector per expert.
void check_experts(const char* name, const std::optional<Tensor>& tensor, int64_t num_experts) {
  MC_REQUIRE(!tensor || (tensor->dim() == 1 && tensor->size(0) == num_experts),
             "{} must be ({},), got {}", name, num_experts, shape_text(*tensor));
}

void check_choices(const char* name, const Tensor& tensor, const moe::RouterRule& rule) {
  MC_REQUIRE(tensor.dim() == 2 && tensor.size(0) == rule.num_tokens && tensor.size(1) == rule.top_k,
             "{} must be ({}, {}), got {}", name, rule.num_tokens, rule.top_k, shape_text(tensor));
}

moe::LossFactors factors_of(const char* name,
                            const std::optional<Tensor>& factor,
                            int64_t num_tokens) {
  if (!factor) {
    return {};
  }
  MC_REQUIRE(factor->dtype() == kDTypes.float32 && (factor->numel() >= 1 || num_tokens == 0),
             "{} must have at least one float32 number, got {}", name, shape_text(*factor));
  return {factor->data<float>(), factor->numel()};
}

}  // namespace

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
  check_experts("bias", bias, rule.num_experts);
  check_experts("seen", seen, rule.num_experts);
  MC_REQUIRE(!seen || (seen->dtype() == kDTypes.int64 && seen->is_contiguous()),
             "seen must be int64 and contiguous");
  logits = contiguous(std::move(logits));
  if (bias) {
    bias = contiguous(std::move(*bias), kDTypes.float32);
  }
  Tensor probs = empty({rule.num_tokens, k}, kDTypes.float32);
  Tensor ids = empty({rule.num_tokens, k}, kDTypes.int64);
  if (chosen) {
    check_choices("chosen", *chosen, rule);
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
  MC_REQUIRE(ids.dim() == 2 && ids.dtype() == kDTypes.int64, "ids must be (T, k) int64, got {}",
             shape_text(ids));
  const moe::RouterRule rule = checked_rule(logits, ids.size(1), num_pools, is_sigmoid,
                                            softmax_after_top_k, normalize, scaling);
  check_choices("ids", ids, rule);
  check_choices("grad_probs", grad_probs, rule);
  MC_REQUIRE(grad_probs.dtype() == kDTypes.float32, "grad_probs must be float32");
  MC_REQUIRE(
      !counts ||
          (counts->dtype() == kDTypes.float32 && counts->numel() == num_pools * rule.num_experts),
      "counts must be ({}, {}) float32, got {}", num_pools, rule.num_experts, shape_text(*counts));
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
