#include <cstdint>
#include <string_view>

#include "bindings.h"
#include "megacore/layers/dropout.h"
#include "megacore/moe/router.h"

namespace py = pybind11;

namespace megacore::bindings {
namespace {

void bind_router(py::module_& module) {
  def_kernel(
      module, "route",
      [](uintptr_t logits, uintptr_t bias, bool keeps_ids, uintptr_t probs, uintptr_t ids,
         uintptr_t stats, uintptr_t losses, uintptr_t seen, float aux_scale, float z_scale,
         int64_t num_tokens, int64_t num_experts, int64_t top_k, int64_t num_pools, bool is_sigmoid,
         bool softmax_after_top_k, bool normalize, float scaling, int num_threads) {
        moe::route(pointer<const float>(logits), pointer<const float>(bias), keeps_ids,
                   {num_tokens, num_experts, top_k, num_pools, is_sigmoid, softmax_after_top_k,
                    normalize, scaling},
                   {.probs = pointer<float>(probs),
                    .ids = pointer<int64_t>(ids),
                    .sums = {.stats = pointer<float>(stats),
                             .losses = pointer<float>(losses),
                             .seen = pointer<int64_t>(seen),
                             .scales = {.aux = aux_scale, .z = z_scale}}},
                   num_threads);
      },
      "logits", "bias", "keeps_ids", "probs", "ids", "stats", "losses", "seen", "aux_scale",
      "z_scale", "num_tokens", "num_experts", "top_k", "num_pools", "is_sigmoid",
      "softmax_after_top_k", "normalize", "scaling", "num_threads");
  def_kernel(
      module, "route_backward",
      [](uintptr_t grad_probs, uintptr_t counts, uintptr_t aux_factors, int64_t num_aux_factors,
         uintptr_t z_factors, int64_t num_z_factors, float aux_scale, float z_scale,
         uintptr_t logits, uintptr_t ids, uintptr_t grad_logits, int64_t num_tokens,
         int64_t num_experts, int64_t top_k, int64_t num_pools, bool is_sigmoid,
         bool softmax_after_top_k, bool normalize, float scaling, int num_threads) {
        moe::route_backward({.probs = pointer<const float>(grad_probs),
                             .counts = pointer<const float>(counts),
                             .aux = {pointer<const float>(aux_factors), num_aux_factors},
                             .z = {pointer<const float>(z_factors), num_z_factors},
                             .scales = {.aux = aux_scale, .z = z_scale}},
                            pointer<const float>(logits), pointer<const int64_t>(ids),
                            pointer<float>(grad_logits),
                            {num_tokens, num_experts, top_k, num_pools, is_sigmoid,
                             softmax_after_top_k, normalize, scaling},
                            num_threads);
      },
      "grad_probs", "counts", "aux_factors", "num_aux_factors", "z_factors", "num_z_factors",
      "aux_scale", "z_scale", "logits", "ids", "grad_logits", "num_tokens", "num_experts", "top_k",
      "num_pools", "is_sigmoid", "softmax_after_top_k", "normalize", "scaling", "num_threads");
}

}  // namespace

void bind_layers(py::module_& module) {
  def_kernel(
      module, "dropout",
      [](uintptr_t x, uintptr_t sample_ids, uintptr_t positions, uintptr_t key, int64_t key_value,
         uintptr_t y, int64_t sequence, int64_t batch, int64_t width, int64_t threshold,
         float factor, std::string_view dtype, int num_threads) {
        for_dtype(dtype, [&]<typename Float>(Float) {
          layers::dropout(pointer<const Float>(x), pointer<const int64_t>(sample_ids),
                          pointer<const int64_t>(positions),
                          key == 0 ? key_value : *pointer<const int64_t>(key),
                          {sequence, batch, width, threshold, factor}, pointer<Float>(y),
                          num_threads);
        });
      },
      "x", "sample_ids", "positions", "key", "key_value", "y", "sequence", "batch", "width",
      "threshold", "factor", "dtype", "num_threads");
  bind_router(module);
}

}  // namespace megacore::bindings
