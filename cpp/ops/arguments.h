// Arguments of operations, checked for both devices, as kernels need them.
//
// A function throws std::invalid_argument if shapes or dtypes do not fit.

#pragma once

#include <cmath>
#include <vector>

#include "megacore/buffer/adamw.h"
#include "megacore/buffer/step_control.h"
#include "megacore/layers/dense.h"
#include "megacore/layers/dropout.h"
#include "megacore/moe/activations.h"
#include "megacore/moe/echo_counts.h"
#include "megacore/moe/fp8.h"
#include "megacore/moe/permutation.h"
#include "megacore/moe/plan_spec.h"
#include "megacore/moe/reroute.h"
#include "megacore/moe/router.h"
#include "tensor.h"

namespace megacore::ops {

inline void check_scalar(const char* name, const Tensor& tensor) {
  MC_REQUIRE(tensor.dtype() == kDTypes.int64 && tensor.numel() == 1,
             "{} must be an int64 scalar, got {}", name, shape_text(tensor));
}
inline void check_scalar(const char* name, const std::optional<Tensor>& tensor) {
  if (tensor) {
    check_scalar(name, *tensor);
  }
}

// ---- norms --------------------------------------------------------------------------------------
inline void check_weight(const Tensor& x, const Tensor& weight) {
  MC_REQUIRE(x.dim() >= 1, "x must have at least one axis, got ()");
  MC_REQUIRE(weight.dim() == 1 && weight.size(0) == x.size(x.dim() - 1),
             "weight must be ({},), as wide as x {}, got {}", x.size(x.dim() - 1), shape_text(x),
             shape_text(weight));
  MC_REQUIRE(weight.dtype() == x.dtype(), "weight must have the dtype of x");
}

inline void check_like(const char* name, const Tensor& tensor, const Tensor& x) {
  MC_REQUIRE(tensor.has_sizes_of(x), "{} must have the shape of x {}, got {}", name, shape_text(x),
             shape_text(tensor));
  MC_REQUIRE(tensor.dtype() == x.dtype(), "{} must have the dtype of x", name);
}

inline void check_norm_backward(const Tensor& grad,
                                const Tensor& x,
                                const Tensor& weight,
                                const Tensor& scale,
                                const std::optional<Tensor>& grad_sum) {
  check_weight(x, weight);
  check_like("grad", grad, x);
  if (grad_sum) {
    check_like("grad_sum", *grad_sum, x);
  }
  MC_REQUIRE(scale.dtype() == kDTypes.float32 && scale.numel() * weight.size(0) == x.numel(),
             "scale must have a float32 number per row of x {}, got {}", shape_text(x),
             shape_text(scale));
}

// Sizes of a number per row of x (..., H), (..., 1).
class RowSizes {
 public:
  explicit RowSizes(const Tensor& x) : dim_(x.sizes().size()) {
    std::copy(x.sizes().begin(), x.sizes().end(), sizes_.begin());
    sizes_[dim_ - 1] = 1;
  }
  std::span<const int64_t> get() const { return {sizes_.data(), dim_}; }

 private:
  std::array<int64_t, kMaxDim> sizes_;
  size_t dim_;
};

// ---- activations --------------------------------------------------------------------------------
// Rows and width of the result.
inline moe::ActivationShape checked_rows(moe::Activation kind,
                                         const Tensor& x,
                                         const std::optional<Tensor>& probs,
                                         const std::optional<Tensor>& num_rows) {
  const int64_t factor = kind == moe::Activation::kSwiglu ? 2 : 1;
  MC_REQUIRE(x.dim() == 2 && x.size(1) % factor == 0, "x must be (M, {}F), got {}",
             factor == 1 ? "" : "2 ", shape_text(x));
  MC_REQUIRE(!probs || (probs->dim() == 1 && probs->size(0) == x.size(0)),
             "probs must be ({},), got {}", x.size(0), shape_text(*probs));
  check_scalar("num_rows", num_rows);
  return {x.size(0), x.size(1) / factor, data_of<int64_t>(num_rows)};
}

inline void check_activation_grad(const Tensor& grad,
                                  const Tensor& x,
                                  const moe::ActivationShape& shape) {
  MC_REQUIRE(grad.dim() == 2 && grad.size(0) == shape.rows && grad.size(1) == shape.width &&
                 grad.dtype() == x.dtype(),
             "grad must be ({}, {}) with the dtype of x, got {}", shape.rows, shape.width,
             shape_text(grad));
}

// ---- dropout ------------------------------------------------------------------------------------
inline layers::DropoutRule checked_dropout(const Tensor& x,
                                           const Tensor& sample_ids,
                                           const Tensor& positions,
                                           const std::optional<Tensor>& key,
                                           double p) {
  MC_REQUIRE(x.dim() == 3, "x must be (S, B, H), got {}", shape_text(x));
  MC_REQUIRE(sample_ids.dtype() == kDTypes.int64 && sample_ids.numel() == x.size(1) &&
                 positions.dtype() == kDTypes.int64 && positions.numel() == x.size(0),
             "sample_ids must be ({},) and positions ({},), int64, got {} and {}", x.size(1),
             x.size(0), shape_text(sample_ids), shape_text(positions));
  check_scalar("key", key);
  MC_REQUIRE(p >= 0.0 && p < 1.0, "p must be in [0, 1), got {}", p);
  // Of 64-bit numbers with a sign, the lower ones are dropped: p 2^64 of them.
  const auto dropped = static_cast<uint64_t>(std::nearbyint(p * 0x1p64));
  const auto threshold = static_cast<int64_t>(dropped ^ (uint64_t{1} << 63));
  return {x.size(0), x.size(1), x.size(2), threshold, static_cast<float>(1.0 / (1.0 - p))};
}

// ---- heads --------------------------------------------------------------------------------------
// Sizes of q (S, B, G Q, D) and k (S, B, G, D), and tables that fit them.
inline layers::HeadShape checked_heads(std::span<const int64_t> q,
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

inline Heads heads_of(const Tensor& qkv, int64_t head_dim) {
  MC_REQUIRE(
      qkv.dim() == 4 && head_dim > 0 && qkv.size(3) % head_dim == 0 && qkv.size(3) / head_dim >= 2,
      "qkv must be (S, B, G, (Q + 2) {}), got {}", head_dim, shape_text(qkv));
  const int64_t q_per_kv = qkv.size(3) / head_dim - 2;
  return {{qkv.size(0), qkv.size(1), qkv.size(2) * q_per_kv, head_dim},
          {qkv.size(0), qkv.size(1), qkv.size(2), head_dim}};
}

inline void check_grads(const Tensor& grad_q, const Tensor& grad_k, const Tensor& grad_v) {
  MC_REQUIRE(grad_k.dim() == 4 && grad_v.has_sizes_of(grad_k) && grad_q.dim() == 4 &&
                 grad_q.size(0) == grad_k.size(0) && grad_q.size(1) == grad_k.size(1) &&
                 grad_q.size(3) == grad_k.size(3) && grad_k.size(2) > 0 &&
                 grad_q.size(2) % grad_k.size(2) == 0,
             "gradients of q, k and v do not fit: {}, {} and {}", shape_text(grad_q),
             shape_text(grad_k), shape_text(grad_v));
  MC_REQUIRE(grad_q.dtype() == grad_k.dtype() && grad_v.dtype() == grad_k.dtype(),
             "gradients of q, k and v must have one dtype");
}

inline void check_norms(const Tensor& qkv, const Tensor& q_weight, const Tensor& k_weight) {
  MC_REQUIRE(q_weight.dim() == 1 && k_weight.has_sizes_of(q_weight),
             "weights of norms must be (D,), got {} and {}", shape_text(q_weight),
             shape_text(k_weight));
  MC_REQUIRE(q_weight.dtype() == qkv.dtype() && k_weight.dtype() == qkv.dtype(),
             "weights of norms must have the dtype of qkv");
}

inline layers::HeadShape checked_norm_grads(const Tensor& grad_q,
                                            const Tensor& grad_k,
                                            const Tensor& grad_v,
                                            const Tensor& qkv,
                                            const Tensor& q_weight,
                                            const Tensor& k_weight,
                                            const Tensor& scale,
                                            const Tensor& cos,
                                            const Tensor& sin) {
  check_norms(qkv, q_weight, k_weight);
  check_grads(grad_q, grad_k, grad_v);
  const Heads heads = heads_of(qkv, q_weight.size(0));
  MC_REQUIRE(grad_q.dtype() == qkv.dtype() && std::ranges::equal(grad_q.sizes(), heads.q) &&
                 std::ranges::equal(grad_k.sizes(), heads.k),
             "gradients {} and {} must fit qkv {}, with its dtype", shape_text(grad_q),
             shape_text(grad_k), shape_text(qkv));
  const layers::HeadShape shape = checked_heads(heads.q, heads.k, cos, sin);
  MC_REQUIRE(scale.dtype() == kDTypes.float32 &&
                 scale.numel() == shape.num_tokens * shape.num_groups * (shape.q_per_kv + 1),
             "scale must have a float32 number per normalized head, got {}", shape_text(scale));
  return shape;
}

// ---- rows of experts ----------------------------------------------------------------------------
inline void check_map(const Tensor& row_map) {
  MC_REQUIRE(row_map.dim() == 2 && row_map.dtype() == kDTypes.int64,
             "row_map must be (T, k) int64, got {}", shape_text(row_map));
}

inline void check_tokens(const Tensor& tokens, const Tensor& row_map) {
  check_map(row_map);
  MC_REQUIRE(tokens.dim() == 2 && tokens.size(0) == row_map.size(0),
             "tokens must be ({}, H), one per row of row_map, got {}", row_map.size(0),
             shape_text(tokens));
}

inline void check_copy_weights(const std::optional<Tensor>& weights, const Tensor& row_map) {
  MC_REQUIRE(!weights || weights->has_sizes_of(row_map),
             "weights must have the shape of row_map {}, got {}", shape_text(row_map),
             shape_text(*weights));
}

inline void check_permute(const Tensor& tokens,
                          const Tensor& row_map,
                          int64_t num_rows,
                          const std::optional<Tensor>& weights) {
  check_tokens(tokens, row_map);
  check_copy_weights(weights, row_map);
  MC_REQUIRE(num_rows >= 0, "num_rows must be at least 0, got {}", num_rows);
}

inline void check_unpermute(const Tensor& rows,
                            const Tensor& row_map,
                            const std::optional<Tensor>& weights) {
  check_map(row_map);
  MC_REQUIRE(rows.dim() == 2, "rows must be (M, H), got {}", shape_text(rows));
  check_copy_weights(weights, row_map);
}

inline void check_copy_probs(const Tensor& probs, const Tensor& row_map) {
  MC_REQUIRE(probs.has_sizes_of(row_map) && probs.dtype() == kDTypes.float32,
             "probs must be float32 with the shape of row_map {}, got {}", shape_text(row_map),
             shape_text(probs));
}

inline void check_row_probs(const Tensor& rows, const Tensor& row_probs) {
  MC_REQUIRE(rows.dim() == 2 && row_probs.dtype() == kDTypes.float32 && row_probs.dim() == 1 &&
                 row_probs.size(0) == rows.size(0),
             "rows must be (M, H) and row_probs (M,) float32, got {} and {}", shape_text(rows),
             shape_text(row_probs));
}

inline void check_row_dots(const Tensor& tokens, const Tensor& rows, const Tensor& row_map) {
  check_tokens(tokens, row_map);
  MC_REQUIRE(rows.dim() == 2 && rows.size(1) == tokens.size(1) && rows.dtype() == tokens.dtype(),
             "rows must be (M, {}) with the dtype of tokens, got {}", tokens.size(1),
             shape_text(rows));
}

inline void check_sort(const Tensor& expert_of, int64_t num_experts) {
  MC_REQUIRE(expert_of.dtype() == kDTypes.int64, "expert_of must be int64");
  MC_REQUIRE(num_experts >= 0, "num_experts must be at least 0, got {}", num_experts);
}

inline void check_top_k(const Tensor& scores, int64_t k) {
  MC_REQUIRE(scores.dim() == 2 && k >= 1 && k <= scores.size(1),
             "k must be in [1, E] for scores (T, E), got {} for {}", k, shape_text(scores));
}

// ---- optimizer ----------------------------------------------------------------------------------
// Memory of an optimizer step as a kernel takes it: no copies, as most of it is written.
inline void check_flat(const char* name, const Tensor& tensor, const Tensor& param) {
  MC_REQUIRE(tensor.dim() == 1 && tensor.has_sizes_of(param),
             "{} {} must be flat and of the size of param {}", name, shape_text(tensor),
             shape_text(param));
  MC_REQUIRE(tensor.is_contiguous(), "{} {} must be contiguous", name, shape_text(tensor));
}

inline buffer::AdamWTensors checked_step(const Tensor& param,
                                         const Tensor& grad,
                                         const Tensor& exp_avg,
                                         const Tensor& exp_avg_sq,
                                         const std::optional<Tensor>& copy_out) {
  const auto check = [&](const char* name, const Tensor& tensor) {
    MC_REQUIRE(tensor.dtype() == kDTypes.float32, "{} {} must be float32", name,
               shape_text(tensor));
    check_flat(name, tensor, param);
  };
  check("param", param);
  check("grad", grad);
  check("exp_avg", exp_avg);
  check("exp_avg_sq", exp_avg_sq);
  if (copy_out) {
    MC_REQUIRE(copy_out->dtype() == kDTypes.bfloat16 || copy_out->dtype() == kDTypes.float16,
               "copy_out {} must be bfloat16 or float16", shape_text(*copy_out));
    check_flat("copy_out", *copy_out, param);
  }
  return {.param = param.mutable_data<float>(),
          .grad = grad.data<float>(),
          .exp_avg = exp_avg.mutable_data<float>(),
          .exp_avg_sq = exp_avg_sq.mutable_data<float>(),
          .copy_out = copy_out ? copy_out->mutable_data<uint16_t>() : nullptr,
          .copy_is_float16 = copy_out && copy_out->dtype() == kDTypes.float16,
          .numel = param.numel()};
}

// Numbers of a struct of float64 alone, for one of which a tensor may have more.
template <typename Numbers>
void check_numbers(const char* name, const Tensor& tensor) {
  constexpr auto kSize = static_cast<int64_t>(sizeof(Numbers) / sizeof(double));
  MC_REQUIRE(tensor.dtype() == kDTypes.float64 && tensor.dim() == 1 && tensor.size(0) >= kSize &&
                 tensor.is_contiguous(),
             "{} {} must be a flat float64 tensor of {} numbers", name, shape_text(tensor), kSize);
}
inline void check_control(const std::optional<Tensor>& control) {
  if (control) {
    check_numbers<buffer::StepControl>("control", *control);
  }
}
inline void check_decision(const Tensor& state, const Tensor& sums, const Tensor& control) {
  check_numbers<buffer::StepState>("state", state);
  check_numbers<buffer::StepSums>("sums", sums);
  check_numbers<buffer::StepControl>("control", control);
}

// ---- plans with clones --------------------------------------------------------------------------
inline void check_integers(const char* name,
                           const Tensor& tensor,
                           std::initializer_list<int64_t> sizes) {
  MC_REQUIRE(tensor.dtype() == kDTypes.int64 && std::ranges::equal(tensor.sizes(), sizes),
             "{} must be {} int64, got {}", name,
             shape_text(std::span<const int64_t>(sizes.begin(), sizes.size())), shape_text(tensor));
}

inline moe::PlanSpec checked_spec(const Tensor& counts,
                                  int64_t rank,
                                  int64_t num_spare_slots,
                                  bool is_balanced,
                                  int64_t tolerance,
                                  int64_t min_imbalance,
                                  int64_t domain_size) {
  MC_REQUIRE(counts.dim() == 2 && counts.dtype() == kDTypes.int64,
             "counts must be (R, E) int64, got {}", shape_text(counts));
  const moe::PlanSpec spec = {
      .method = is_balanced ? moe::PlanMethod::kBalanced : moe::PlanMethod::kEcho,
      .num_spare_slots = num_spare_slots,
      .tolerance_per_million = tolerance,
      .min_imbalance_per_million = min_imbalance,
      .domain_size = domain_size};
  moe::require_spec(spec, counts.size(0));
  MC_REQUIRE(rank >= 0 && rank < counts.size(0), "rank must be in [0, {}), got {}", counts.size(0),
             rank);
  return spec;
}

inline moe::PlanShape checked_slots(const Tensor& slot_expert, int64_t num_experts) {
  MC_REQUIRE(slot_expert.dim() == 2 && slot_expert.dtype() == kDTypes.int64,
             "slot_expert must be (R, S) int64, got {}", shape_text(slot_expert));
  const moe::PlanShape shape = {.num_ranks = slot_expert.size(0),
                                .num_experts = num_experts,
                                .num_spare_slots = slot_expert.size(1)};
  MC_REQUIRE(shape.num_ranks >= 1 && num_experts >= 0 && num_experts % shape.num_ranks == 0,
             "{} experts do not divide over {} ranks", num_experts, shape.num_ranks);
  return shape;
}

// REQUIRES: contiguous tensors.
inline moe::SourceRow checked_source_row(const Tensor& expert_ids,
                                         const Tensor& total,
                                         const Tensor& first,
                                         const Tensor& slot_expert,
                                         const Tensor& tokens) {
  MC_REQUIRE(expert_ids.dtype() == kDTypes.int64, "expert_ids must be int64");
  MC_REQUIRE(total.dim() == 1 && total.dtype() == kDTypes.int64, "total must be (E,) int64, got {}",
             shape_text(total));
  const moe::PlanShape shape = checked_slots(slot_expert, total.size(0));
  check_integers("first", first, {shape.num_experts});
  check_integers("tokens", tokens, {shape.num_ranks, shape.num_spare_slots});
  return {.shape = shape,
          .total = total.data<int64_t>(),
          .first = first.data<int64_t>(),
          .slot_expert = slot_expert.data<int64_t>(),
          .tokens = tokens.data<int64_t>()};
}

inline void check_echo_sums(const Tensor& sums) {
  MC_REQUIRE(sums.dtype() == kDTypes.float64 && sums.dim() == 1 &&
                 sums.size(0) == moe::kNumEchoSums && sums.is_contiguous(),
             "sums must be ({},) float64, contiguous, got {}", int{moe::kNumEchoSums},
             shape_text(sums));
}

// REQUIRES: contiguous tensors.
inline moe::EchoReport checked_report(const moe::PlanShape& shape,
                                      const Tensor& load_before,
                                      const Tensor& summary,
                                      const Tensor& elapsed_ns,
                                      const Tensor& copies_of_place) {
  check_integers("load_before", load_before, {shape.num_ranks});
  check_integers("summary", summary, {moe::kPlanNumbers});
  check_integers("elapsed_ns", elapsed_ns, {1});
  check_integers("copies_of_place", copies_of_place, {shape.num_experts + shape.num_slots()});
  return {.load_before = load_before.data<int64_t>(),
          .summary = summary.data<moe::PlanSummary>(),
          .elapsed_ns = elapsed_ns.data<int64_t>()};
}

// ---- 8-bit floats -------------------------------------------------------------------------------
inline void check_quantize_rows(const Tensor& x, const std::optional<Tensor>& num_rows) {
  MC_REQUIRE(x.dim() == 2, "x must be (M, K), got {}", shape_text(x));
  check_scalar("num_rows", num_rows);
}

// REQUIRES: contiguous splits.
inline moe::ExpertRows checked_expert_rows(const Tensor& x, const std::optional<Tensor>& m_splits) {
  MC_REQUIRE(x.dim() == 2, "x must be (M, K), got {}", shape_text(x));
  MC_REQUIRE(!m_splits || (m_splits->dim() == 1 && m_splits->dtype() == kDTypes.int64),
             "m_splits must be (E,) int64, got {}", shape_text(*m_splits));
  return {data_of<int64_t>(m_splits), x.size(0), m_splits ? m_splits->size(0) : 1, x.size(1)};
}

// Shapes of quantized columns, which are flat in memory if they are transposed.
struct QuantizedColumns {
  QuantizedColumns(const moe::ExpertRows& rows, bool transposed)
      : scales{moe::row_blocks(rows.rows, rows.num_experts), rows.width} {
    if (transposed) {
      values = {scales[0] * moe::kScaleBlock * rows.width};
    } else {
      values = {rows.rows, rows.width};
    }
  }
  std::vector<int64_t> values;
  std::array<int64_t, 2> scales;
};

// Shapes of quantized matrices (E, N, K).
struct QuantizedBlocks {
  QuantizedBlocks(const Tensor& w, bool transposed) {
    MC_REQUIRE(w.dim() == 3, "w must be (E, N, K), got {}", shape_text(w));
    values = {w.size(0), w.size(transposed ? 2 : 1), w.size(transposed ? 1 : 2)};
    scales = {values[0], moe::scale_blocks(values[1]), moe::scale_blocks(values[2])};
  }
  // Values are bytes: torch's tools for operations know no 8-bit floats that are written to.
  void check(const Tensor& values_out, const Tensor& scales_out) const {
    MC_REQUIRE(std::ranges::equal(values_out.sizes(), values) &&
                   values_out.dtype() == kDTypes.uint8 && values_out.is_contiguous(),
               "values must be {} uint8, contiguous, got {}", shape_text(values),
               shape_text(values_out));
    MC_REQUIRE(std::ranges::equal(scales_out.sizes(), scales) &&
                   scales_out.dtype() == kDTypes.float32 && scales_out.is_contiguous(),
               "scales must be {} float32, contiguous, got {}", shape_text(scales),
               shape_text(scales_out));
  }
  std::array<int64_t, 3> values;
  std::array<int64_t, 3> scales;
};

// ---- router -------------------------------------------------------------------------------------
inline moe::RouterRule checked_rule(const Tensor& logits,
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
inline void check_experts(const char* name,
                          const std::optional<Tensor>& tensor,
                          int64_t num_experts) {
  MC_REQUIRE(!tensor || (tensor->dim() == 1 && tensor->size(0) == num_experts),
             "{} must be ({},), got {}", name, num_experts, shape_text(*tensor));
}

inline void check_choices(const char* name, const Tensor& tensor, const moe::RouterRule& rule) {
  MC_REQUIRE(tensor.dim() == 2 && tensor.size(0) == rule.num_tokens && tensor.size(1) == rule.top_k,
             "{} must be ({}, {}), got {}", name, rule.num_tokens, rule.top_k, shape_text(tensor));
}

inline moe::LossFactors factors_of(const char* name,
                                   const std::optional<Tensor>& factor,
                                   int64_t num_tokens) {
  if (!factor) {
    return {};
  }
  MC_REQUIRE(factor->dtype() == kDTypes.float32 && (factor->numel() >= 1 || num_tokens == 0),
             "{} must have at least one float32 number, got {}", name, shape_text(*factor));
  return {factor->data<float>(), factor->numel()};
}

inline void check_route(const moe::RouterRule& rule,
                        const std::optional<Tensor>& bias,
                        const std::optional<Tensor>& chosen,
                        const std::optional<Tensor>& seen) {
  check_experts("bias", bias, rule.num_experts);
  check_experts("seen", seen, rule.num_experts);
  MC_REQUIRE(!seen || (seen->dtype() == kDTypes.int64 && seen->is_contiguous()),
             "seen must be int64 and contiguous");
  if (chosen) {
    check_choices("chosen", *chosen, rule);
  }
}

inline void check_route_backward(const moe::RouterRule& rule,
                                 const Tensor& grad_probs,
                                 const Tensor& ids,
                                 const std::optional<Tensor>& counts) {
  MC_REQUIRE(ids.dtype() == kDTypes.int64, "ids must be int64");
  check_choices("ids", ids, rule);
  check_choices("grad_probs", grad_probs, rule);
  MC_REQUIRE(grad_probs.dtype() == kDTypes.float32, "grad_probs must be float32");
  MC_REQUIRE(!counts || (counts->dtype() == kDTypes.float32 &&
                         counts->numel() == rule.num_pools * rule.num_experts),
             "counts must be ({}, {}) float32, got {}", rule.num_pools, rule.num_experts,
             shape_text(*counts));
}

}  // namespace megacore::ops
