#include <pybind11/stl.h>

#include <cstdint>
#include <utility>

#include "bindings.h"
#include "megacore/base/check.h"
#include "megacore/cuda/grouped_gemm.h"

namespace py = pybind11;

namespace megacore::bindings {
namespace {

// An integer of Python as an enumerator of ours, if it is one.
template <typename Enum>
Enum enumerator(const char* name, int32_t value, Enum last) {
  MC_REQUIRE(value >= 0 && value <= static_cast<int32_t>(last), "{} must be 0 to {}, got {}", name,
             static_cast<int32_t>(last), value);
  return static_cast<Enum>(value);
}

moe::GroupedProduct product_of(int32_t value) {
  return enumerator("product", value, moe::GroupedProduct::kWeightGrad);
}

using Launcher = void (*)(const cuda::GroupedGemmParams&, cudaStream_t);

// Both launchers take the same arguments.
template <Launcher launcher>
void define_launcher(py::module_& module, const char* name) {
  def_kernel(
      module, name,
      [](int32_t product, uintptr_t a, uintptr_t b, uintptr_t m_splits, uintptr_t d,
         int32_t operand, int32_t result, int64_t num_rows, int64_t num_experts,
         int64_t out_features, int64_t in_features, bool accumulate, uintptr_t accumulate_mask,
         bool clear_tail, int32_t tile, bool along_columns, uintptr_t workspace,
         size_t workspace_bytes, uintptr_t stream, uintptr_t first_row, int64_t expected_rows,
         uintptr_t a_scale, uintptr_t b_scale) {
        launcher({.product = product_of(product),
                  .a = device_pointer<const void>(a),
                  .b = device_pointer<const void>(b),
                  .a_scale = device_pointer<const float>(a_scale),
                  .b_scale = device_pointer<const float>(b_scale),
                  .m_splits = device_pointer<const int64_t>(m_splits),
                  .first_row = device_pointer<const int64_t>(first_row),
                  .d = device_pointer<void>(d),
                  .operand = enumerator("operand", operand, cuda::GroupedType::kFloat8),
                  .result = enumerator("result", result, cuda::GroupedType::kFloat32),
                  .num_rows = num_rows,
                  .expected_rows = expected_rows,
                  .num_experts = num_experts,
                  .out_features = out_features,
                  .in_features = in_features,
                  .accumulate = accumulate,
                  .accumulate_mask = device_pointer<const uint8_t>(accumulate_mask),
                  .clear_tail = clear_tail,
                  .plan = {.tile = enumerator("tile", tile, cuda::GroupedTile::kSquare),
                           .along_columns = along_columns},
                  .workspace = device_pointer<void>(workspace),
                  .workspace_bytes = workspace_bytes},
                 stream_handle(stream));
      },
      "product", "a", "b", "m_splits", "d", "operand", "result", "num_rows", "num_experts",
      "out_features", "in_features", "accumulate", "accumulate_mask", "clear_tail", "tile",
      "along_columns", "workspace", "workspace_bytes", "stream", py::arg("first_row") = 0,
      py::arg("expected_rows") = 0, py::arg("a_scale") = 0, py::arg("b_scale") = 0);
}

}  // namespace

void bind_gemm(py::module_& module) {
  define_launcher<cuda::grouped_gemm>(module, "grouped_gemm");
  define_launcher<cuda::grouped_gemm_set_up>(module, "grouped_gemm_set_up");
  module.def("grouped_gemm_archs", &cuda::grouped_gemm_archs);
  module.def("grouped_gemm_workspace_bytes", &cuda::grouped_gemm_workspace_bytes, py::kw_only(),
             py::arg("num_experts"));
  module.def(
      "grouped_gemm_plan",
      [](int32_t product, int64_t num_rows, int64_t num_experts, int64_t out_features,
         int64_t in_features, int major, int64_t expected_rows) {
        const cuda::GroupedPlan plan = cuda::choose_grouped_plan({.product = product_of(product),
                                                                  .num_rows = num_rows,
                                                                  .num_experts = num_experts,
                                                                  .out_features = out_features,
                                                                  .in_features = in_features,
                                                                  .operand_bytes = 2,
                                                                  .result_bytes = 2},
                                                                 expected_rows, major);
        return std::pair(static_cast<int32_t>(plan.tile), plan.along_columns);
      },
      py::kw_only(), py::arg("product"), py::arg("num_rows"), py::arg("num_experts"),
      py::arg("out_features"), py::arg("in_features"), py::arg("major"),
      py::arg("expected_rows") = 0);
}

}  // namespace megacore::bindings
