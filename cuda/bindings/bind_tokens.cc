#include <cstdint>
#include <string_view>

#include "bindings.h"
#include "megacore/cuda/activations.h"
#include "megacore/cuda/permutation.h"
#include "megacore/cuda/topk.h"

namespace py = pybind11;

namespace megacore::bindings {
namespace {

using cuda::FloatType;
using moe::Activation;

void bind_permutation(py::module_& module) {
  module.def("sort_workspace_numel", &cuda::sort_workspace_numel, py::kw_only(), py::arg("numel"),
             py::arg("num_experts"));
  def_kernel(
      module, "sort_by_expert",
      [](uintptr_t expert_of, int64_t numel, int64_t num_experts, uintptr_t row_map,
         uintptr_t tokens_per_expert, uintptr_t workspace, uintptr_t stream) {
        cuda::sort_by_expert({.expert_of = device_pointer<const int64_t>(expert_of),
                              .numel = numel,
                              .num_experts = num_experts,
                              .row_map = device_pointer<int64_t>(row_map),
                              .tokens_per_expert = device_pointer<int64_t>(tokens_per_expert),
                              .workspace = device_pointer<int32_t>(workspace)},
                             stream_handle(stream));
      },
      "expert_of", "numel", "num_experts", "row_map", "tokens_per_expert", "workspace", "stream");
}

// Defines an operation on arrays, whose keywords are `names`, and a row map.
template <typename... Arrays, typename... Names>
void def_row_operation(py::module_& module,
                       const char* name,
                       void (*run)(const cuda::RowMap&, FloatType, cudaStream_t, Arrays...),
                       const Names&... names) {
  def_kernel(
      module, name,
      [run](Arrays... arrays, uintptr_t row_map, int64_t num_tokens, int64_t num_choices,
            int64_t num_rows, int64_t width, std::string_view dtype, uintptr_t stream) {
        run({.rows = device_pointer<const int64_t>(row_map),
             .num_tokens = num_tokens,
             .num_choices = num_choices,
             .num_rows = num_rows,
             .width = width},
            float_type(dtype), stream_handle(stream), arrays...);
      },
      names..., "row_map", "num_tokens", "num_choices", "num_rows", "width", "dtype", "stream");
}

void bind_rows(py::module_& module) {
  def_row_operation(
      module, "permute",
      +[](const cuda::RowMap& map, FloatType type, cudaStream_t stream, uintptr_t tokens,
          uintptr_t weights, uintptr_t rows, uintptr_t is_written) {
        cuda::permute({.tokens = device_pointer<const void>(tokens),
                       .weights = device_pointer<const float>(weights),
                       .rows = device_pointer<void>(rows),
                       .is_written = device_pointer<uint8_t>(is_written),
                       .map = map,
                       .type = type},
                      stream);
      },
      "tokens", "weights", "rows", "is_written");
  def_row_operation(
      module, "unpermute",
      +[](const cuda::RowMap& map, FloatType type, cudaStream_t stream, uintptr_t rows,
          uintptr_t weights, uintptr_t tokens) {
        cuda::unpermute({.rows = device_pointer<const void>(rows),
                         .weights = device_pointer<const float>(weights),
                         .tokens = device_pointer<void>(tokens),
                         .map = map,
                         .type = type},
                        stream);
      },
      "rows", "weights", "tokens");
  def_row_operation(
      module, "row_dots",
      +[](const cuda::RowMap& map, FloatType type, cudaStream_t stream, uintptr_t tokens,
          uintptr_t rows, uintptr_t dots) {
        cuda::row_dots({.tokens = device_pointer<const void>(tokens),
                        .rows = device_pointer<const void>(rows),
                        .dots = device_pointer<float>(dots),
                        .map = map,
                        .type = type},
                       stream);
      },
      "tokens", "rows", "dots");
}

void bind_top_k(py::module_& module) {
  def_kernel(
      module, "top_k",
      [](uintptr_t scores, int64_t rows, int64_t columns, int64_t k, uintptr_t chosen,
         uintptr_t stream) {
        cuda::top_k({.scores = device_pointer<const float>(scores),
                     .rows = rows,
                     .columns = columns,
                     .k = k,
                     .chosen = device_pointer<int64_t>(chosen)},
                    stream_handle(stream));
      },
      "scores", "rows", "columns", "k", "chosen", "stream");
}

template <Activation kKind>
void bind_activation(py::module_& module, const char* forward, const char* backward) {
  def_kernel(
      module, forward,
      [](uintptr_t x, uintptr_t probs, uintptr_t y, uintptr_t num_rows, int64_t rows, int64_t width,
         std::string_view dtype, uintptr_t stream) {
        cuda::activate({.kind = kKind,
                        .type = float_type(dtype),
                        .x = device_pointer<const void>(x),
                        .probs = device_pointer<const float>(probs),
                        .y = device_pointer<void>(y),
                        .num_rows = device_pointer<const int64_t>(num_rows),
                        .rows = rows,
                        .width = width},
                       stream_handle(stream));
      },
      "x", "probs", "y", "num_rows", "rows", "width", "dtype", "stream");
  def_kernel(
      module, backward,
      [](uintptr_t grad_y, uintptr_t x, uintptr_t probs, uintptr_t grad_x, uintptr_t grad_probs,
         uintptr_t num_rows, int64_t rows, int64_t width, std::string_view dtype,
         uintptr_t stream) {
        cuda::activate_backward({.kind = kKind,
                                 .type = float_type(dtype),
                                 .grad_y = device_pointer<const void>(grad_y),
                                 .x = device_pointer<const void>(x),
                                 .probs = device_pointer<const float>(probs),
                                 .grad_x = device_pointer<void>(grad_x),
                                 .grad_probs = device_pointer<float>(grad_probs),
                                 .num_rows = device_pointer<const int64_t>(num_rows),
                                 .rows = rows,
                                 .width = width},
                                stream_handle(stream));
      },
      "grad_y", "x", "probs", "grad_x", "grad_probs", "num_rows", "rows", "width", "dtype",
      "stream");
}

}  // namespace

void bind_tokens(py::module_& module) {
  module.attr("MAX_SORTED_EXPERTS") = cuda::kMaxSortedExperts;
  module.attr("MAX_TOP_K_COLUMNS") = cuda::kMaxTopKColumns;
  bind_permutation(module);
  bind_rows(module);
  bind_top_k(module);
  bind_activation<Activation::kSwiglu>(module, "swiglu", "swiglu_backward");
  bind_activation<Activation::kGelu>(module, "gelu", "gelu_backward");
}

}  // namespace megacore::bindings
