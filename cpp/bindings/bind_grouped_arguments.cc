#include <cstdint>

#include "bindings.h"
#include "megacore/base/check.h"
#include "megacore/moe/grouped_arguments.h"

namespace py = pybind11;

namespace megacore::bindings {

void bind_grouped_arguments(py::module_& module) {
  module.def("grouped_arguments_bytes", &moe::grouped_arguments_bytes, py::kw_only(),
             py::arg("num_experts"));
  module.def(
      "fill_grouped_arguments",
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
            reinterpret_cast<const int64_t*>(m_splits), reinterpret_cast<const int64_t*>(first_row),
            reinterpret_cast<const uint8_t*>(accumulate_mask), accumulate,
            {.a = a, .b = b, .d = d, .a_scale = a_scale, .b_scale = b_scale},
            moe::grouped_arguments_at(reinterpret_cast<void*>(arguments), num_experts));
      },
      py::kw_only(), py::arg("product"), py::arg("m_splits"), py::arg("accumulate_mask"),
      py::arg("accumulate"), py::arg("num_rows"), py::arg("num_experts"), py::arg("out_features"),
      py::arg("in_features"), py::arg("operand_bytes"), py::arg("result_bytes"), py::arg("a"),
      py::arg("b"), py::arg("d"), py::arg("arguments"), py::arg("first_row") = 0,
      py::arg("a_scale") = 0, py::arg("b_scale") = 0, py::call_guard<py::gil_scoped_release>());
}

}  // namespace megacore::bindings
