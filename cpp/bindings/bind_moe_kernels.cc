#include <cstdint>

#include "bindings.h"
#include "megacore/base/check.h"
#include "megacore/moe/grouped_arguments.h"
#include "megacore/moe/grouped_gemm.h"

namespace py = pybind11;

namespace megacore::bindings {
namespace {

void bind_grouped_arguments(py::module_& module) {
  module.def("grouped_arguments_bytes", &moe::grouped_arguments_bytes, py::kw_only(),
             py::arg("num_experts"));
  def_kernel(
      module, "fill_grouped_arguments",
      [](int32_t product, uintptr_t m_splits, uintptr_t accumulate_mask, bool accumulate,
         int64_t num_rows, int64_t num_experts, int64_t out_features, int64_t in_features,
         int64_t operand_bytes, int64_t result_bytes, uint64_t a, uint64_t b, uint64_t d,
         uintptr_t arguments, uintptr_t first_row, uint64_t a_scale, uint64_t b_scale) {
        MC_REQUIRE(product >= 0 && product <= 2, "product must be 0, 1 or 2, got {}", product);
        moe::fill_grouped_arguments(
            {.product = static_cast<moe::GroupedProduct>(product),
             .num_rows = num_rows,
             .num_experts = num_experts,
             .out_features = out_features,
             .in_features = in_features,
             .operand_bytes = operand_bytes,
             .result_bytes = result_bytes},
            pointer<const int64_t>(m_splits), pointer<const int64_t>(first_row),
            pointer<const uint8_t>(accumulate_mask), accumulate,
            {.a = a, .b = b, .d = d, .a_scale = a_scale, .b_scale = b_scale},
            moe::grouped_arguments_at(pointer<void>(arguments), num_experts));
      },
      "product", "m_splits", "accumulate_mask", "accumulate", "num_rows", "num_experts",
      "out_features", "in_features", "operand_bytes", "result_bytes", "a", "b", "d", "arguments",
      py::arg("first_row") = 0, py::arg("a_scale") = 0, py::arg("b_scale") = 0);
}

}  // namespace

void bind_moe_kernels(py::module_& module) {
  module.def("is_faster_than_mkl", &moe::is_faster_than_mkl);
  bind_grouped_arguments(module);
}

}  // namespace megacore::bindings
