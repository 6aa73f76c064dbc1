#include <cstdint>
#include <string_view>

#include "bindings.h"
#include "megacore/cuda/dense.h"
#include "megacore/cuda/dropout.h"
#include "megacore/cuda/router.h"

namespace py = pybind11;

namespace megacore::bindings {
namespace {

void bind_rms_norm(py::module_& module) {
  module.attr("MAX_NORM_BYTES") = cuda::kMaxNormPacks * 16;
  module.def(
      "norm_partial_rows",
      [](int64_t rows, int64_t width, std::string_view dtype) {
        return cuda::norm_partial_rows(float_type(dtype), rows, width);
      },
      py::kw_only(), py::arg("rows"), py::arg("width"), py::arg("dtype"));
  def_kernel(
      module, "rms_norm",
      [](uintptr_t x, uintptr_t weight, float eps, uintptr_t y, uintptr_t scale, int64_t rows,
         int64_t width, std::string_view dtype, uintptr_t stream, uintptr_t added, uintptr_t sum) {
        cuda::rms_norm({.type = float_type(dtype),
                        .x = device_pointer<const void>(x),
                        .added = device_pointer<const void>(added),
                        .weight = device_pointer<const void>(weight),
                        .sum = device_pointer<void>(sum),
                        .y = device_pointer<void>(y),
                        .scale = device_pointer<float>(scale),
                        .rows = rows,
                        .width = width,
                        .eps = eps},
                       stream_handle(stream));
      },
      "x", "weight", "eps", "y", "scale", "rows", "width", "dtype", "stream", py::arg("added") = 0,
      py::arg("sum") = 0);
  def_kernel(
      module, "rms_norm_backward",
      [](uintptr_t grad_y, uintptr_t x, uintptr_t weight, uintptr_t scale, uintptr_t grad_x,
         uintptr_t grad_weight, uintptr_t partial_sums, int64_t rows, int64_t width,
         std::string_view dtype, uintptr_t stream, uintptr_t grad_sum) {
        cuda::rms_norm_backward({.type = float_type(dtype),
                                 .grad_y = device_pointer<const void>(grad_y),
                                 .grad_sum = device_pointer<const void>(grad_sum),
                                 .x = device_pointer<const void>(x),
                                 .weight = device_pointer<const void>(weight),
                                 .scale = device_pointer<const float>(scale),
                                 .grad_x = device_pointer<void>(grad_x),
                                 .grad_weight = device_pointer<void>(grad_weight),
                                 .partial_sums = device_pointer<float>(partial_sums),
                                 .rows = rows,
                                 .width = width},
                                stream_handle(stream));
      },
      "grad_y", "x", "weight", "scale", "grad_x", "grad_weight", "partial_sums", "rows", "width",
      "dtype", "stream", py::arg("grad_sum") = 0);
}

void bind_rotation(py::module_& module) {
  def_kernel(
      module, "split_and_rotate",
      [](uintptr_t qkv, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t cos, uintptr_t sin,
         int64_t num_tokens, int64_t batch, int64_t num_groups, int64_t q_per_kv, int64_t head_dim,
         int64_t num_rotated, bool position_per_sample, bool backward, std::string_view dtype,
         uintptr_t stream) {
        cuda::split_and_rotate({.type = float_type(dtype),
                                .qkv = device_pointer<void>(qkv),
                                .q = device_pointer<void>(q),
                                .k = device_pointer<void>(k),
                                .v = device_pointer<void>(v),
                                .cos = device_pointer<const float>(cos),
                                .sin = device_pointer<const float>(sin),
                                .shape = {.num_tokens = num_tokens,
                                          .batch = batch,
                                          .num_groups = num_groups,
                                          .q_per_kv = q_per_kv,
                                          .head_dim = head_dim,
                                          .num_rotated = num_rotated,
                                          .position_per_sample = position_per_sample},
                                .backward = backward},
                               stream_handle(stream));
      },
      "qkv", "q", "k", "v", "cos", "sin", "num_tokens", "batch", "num_groups", "q_per_kv",
      "head_dim", "num_rotated", "position_per_sample", "backward", "dtype", "stream");
}

void bind_normed_rotation(py::module_& module) {
  module.attr("MAX_NORMED_HEAD_BYTES") = cuda::kMaxNormedHeadBytes;
  module.def("norm_rotate_partial_rows", &cuda::norm_rotate_partial_rows, py::kw_only(),
             py::arg("num_heads"));
  def_kernel(
      module, "norm_and_rotate",
      [](uintptr_t qkv, uintptr_t q_weight, uintptr_t k_weight, float eps, uintptr_t scale,
         uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t cos, uintptr_t sin, uintptr_t grad_qkv,
         uintptr_t grad_q_weight, uintptr_t grad_k_weight, uintptr_t partial_sums,
         int64_t num_tokens, int64_t batch, int64_t num_groups, int64_t q_per_kv, int64_t head_dim,
         int64_t num_rotated, bool position_per_sample, bool backward, std::string_view dtype,
         uintptr_t stream) {
        cuda::norm_and_rotate({.heads = {.type = float_type(dtype),
                                         .qkv = device_pointer<void>(backward ? grad_qkv : qkv),
                                         .q = device_pointer<void>(q),
                                         .k = device_pointer<void>(k),
                                         .v = device_pointer<void>(v),
                                         .cos = device_pointer<const float>(cos),
                                         .sin = device_pointer<const float>(sin),
                                         .shape = {.num_tokens = num_tokens,
                                                   .batch = batch,
                                                   .num_groups = num_groups,
                                                   .q_per_kv = q_per_kv,
                                                   .head_dim = head_dim,
                                                   .num_rotated = num_rotated,
                                                   .position_per_sample = position_per_sample},
                                         .backward = backward},
                               .x = device_pointer<const void>(qkv),
                               .q_weight = device_pointer<const void>(q_weight),
                               .k_weight = device_pointer<const void>(k_weight),
                               .eps = eps,
                               .scale = device_pointer<float>(scale),
                               .grad_q_weight = device_pointer<void>(grad_q_weight),
                               .grad_k_weight = device_pointer<void>(grad_k_weight),
                               .partial_sums = device_pointer<float>(partial_sums)},
                              stream_handle(stream));
      },
      "qkv", "q_weight", "k_weight", "eps", "scale", "q", "k", "v", "cos", "sin", "grad_qkv",
      "grad_q_weight", "grad_k_weight", "partial_sums", "num_tokens", "batch", "num_groups",
      "q_per_kv", "head_dim", "num_rotated", "position_per_sample", "backward", "dtype", "stream");
}

void bind_dropout(py::module_& module) {
  def_kernel(
      module, "dropout",
      [](uintptr_t x, uintptr_t sample_ids, uintptr_t positions, uintptr_t key, int64_t key_value,
         uintptr_t y, int64_t sequence, int64_t batch, int64_t width, int64_t threshold,
         float factor, std::string_view dtype, uintptr_t stream) {
        cuda::dropout({.type = float_type(dtype),
                       .x = device_pointer<const void>(x),
                       .sample_ids = device_pointer<const int64_t>(sample_ids),
                       .positions = device_pointer<const int64_t>(positions),
                       .key = device_pointer<const int64_t>(key),
                       .key_value = key_value,
                       .y = device_pointer<void>(y),
                       .rule = {sequence, batch, width, threshold, factor}},
                      stream_handle(stream));
      },
      "x", "sample_ids", "positions", "key", "key_value", "y", "sequence", "batch", "width",
      "threshold", "factor", "dtype", "stream");
}

// Defines a function of its own arguments, whose keywords are `names`, a rule and a stream.
template <typename... Own, typename... Names>
void def_with_rule(py::module_& module,
                   const char* name,
                   void (*call)(const moe::RouterRule&, cudaStream_t, Own...),
                   const Names&... names) {
  def_kernel(
      module, name,
      [call](Own... own, int64_t num_tokens, int64_t num_experts, int64_t top_k, int64_t num_pools,
             bool is_sigmoid, bool softmax_after_top_k, bool normalize, float scaling,
             uintptr_t stream) {
        call({num_tokens, num_experts, top_k, num_pools, is_sigmoid, softmax_after_top_k, normalize,
              scaling},
             stream_handle(stream), own...);
      },
      names..., "num_tokens", "num_experts", "top_k", "num_pools", "is_sigmoid",
      "softmax_after_top_k", "normalize", "scaling", "stream");
}

void bind_router(py::module_& module) {
  module.attr("MAX_ROUTER_EXPERTS") = cuda::kMaxRouterExperts;
  module.attr("MAX_ROUTER_CHOICES") = cuda::kMaxRouterChoices;
  module.def(
      "route_workspace_numel",
      [](int64_t num_tokens, int64_t num_experts, int64_t num_pools) {
        moe::RouterRule rule{};
        rule.num_tokens = num_tokens;
        rule.num_experts = num_experts;
        rule.num_pools = num_pools;
        return cuda::route_workspace_numel(rule);
      },
      py::kw_only(), py::arg("num_tokens"), py::arg("num_experts"), py::arg("num_pools"));
  def_with_rule(
      module, "route",
      +[](const moe::RouterRule& rule, cudaStream_t stream, uintptr_t logits, uintptr_t bias,
          bool keeps_ids, uintptr_t probs, uintptr_t ids, uintptr_t stats, uintptr_t losses,
          uintptr_t seen, float aux_scale, float z_scale, uintptr_t workspace) {
        cuda::route({.logits = device_pointer<const float>(logits),
                     .bias = device_pointer<const float>(bias),
                     .keeps_ids = keeps_ids,
                     .rule = rule,
                     .routed = {.probs = device_pointer<float>(probs),
                                .ids = device_pointer<int64_t>(ids),
                                .sums = {.stats = device_pointer<float>(stats),
                                         .losses = device_pointer<float>(losses),
                                         .seen = device_pointer<int64_t>(seen),
                                         .scales = {.aux = aux_scale, .z = z_scale}}},
                     .workspace = device_pointer<float>(workspace)},
                    stream);
      },
      "logits", "bias", "keeps_ids", "probs", "ids", "stats", "losses", "seen", "aux_scale",
      "z_scale", "workspace");
  def_with_rule(
      module, "route_backward",
      +[](const moe::RouterRule& rule, cudaStream_t stream, uintptr_t grad_probs, uintptr_t counts,
          uintptr_t aux_factors, int64_t num_aux_factors, uintptr_t z_factors,
          int64_t num_z_factors, float aux_scale, float z_scale, uintptr_t logits, uintptr_t ids,
          uintptr_t grad_logits) {
        cuda::route_backward(
            {.grads = {.probs = device_pointer<const float>(grad_probs),
                       .counts = device_pointer<const float>(counts),
                       .aux = {device_pointer<const float>(aux_factors), num_aux_factors},
                       .z = {device_pointer<const float>(z_factors), num_z_factors},
                       .scales = {.aux = aux_scale, .z = z_scale}},
             .logits = device_pointer<const float>(logits),
             .ids = device_pointer<const int64_t>(ids),
             .grad_logits = device_pointer<float>(grad_logits),
             .rule = rule},
            stream);
      },
      "grad_probs", "counts", "aux_factors", "num_aux_factors", "z_factors", "num_z_factors",
      "aux_scale", "z_scale", "logits", "ids", "grad_logits");
}

}  // namespace

void bind_layers(py::module_& module) {
  bind_rms_norm(module);
  bind_rotation(module);
  bind_normed_rotation(module);
  bind_dropout(module);
  bind_router(module);
}

}  // namespace megacore::bindings
