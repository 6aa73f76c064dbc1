#include <cstdint>
#include <string_view>

#include "bindings.h"
#include "megacore/cuda/fp8.h"

namespace py = pybind11;

namespace megacore::bindings {

void bind_fp8(py::module_& module) {
  def_kernel(
      module, "quantize_rows",
      [](uintptr_t x, uintptr_t values, uintptr_t scales, uintptr_t num_rows, int64_t rows,
         int64_t width, std::string_view dtype, uintptr_t stream) {
        cuda::quantize_rows({.type = float_type(dtype),
                             .x = device_pointer<const void>(x),
                             .values = device_pointer<uint8_t>(values),
                             .scales = device_pointer<float>(scales),
                             .num_rows = device_pointer<const int64_t>(num_rows),
                             .rows = rows,
                             .width = width},
                            stream_handle(stream));
      },
      "x", "values", "scales", "num_rows", "rows", "width", "dtype", "stream");
  def_kernel(
      module, "quantize_columns",
      [](uintptr_t x, uintptr_t values, uintptr_t scales, uintptr_t m_splits, int64_t rows,
         int64_t num_experts, int64_t width, bool transposed, std::string_view dtype,
         uintptr_t stream) {
        cuda::quantize_columns({.type = float_type(dtype),
                                .x = device_pointer<const void>(x),
                                .values = device_pointer<uint8_t>(values),
                                .scales = device_pointer<float>(scales),
                                .shape = {.m_splits = device_pointer<const int64_t>(m_splits),
                                          .rows = rows,
                                          .num_experts = num_experts,
                                          .width = width},
                                .transposed = transposed},
                               stream_handle(stream));
      },
      "x", "values", "scales", "m_splits", "rows", "num_experts", "width", "transposed", "dtype",
      "stream");
  def_kernel(
      module, "quantize_blocks",
      [](uintptr_t x, uintptr_t values, uintptr_t scales, int64_t num_experts, int64_t height,
         int64_t width, bool transposed, std::string_view dtype, uintptr_t stream) {
        cuda::quantize_blocks({.type = float_type(dtype),
                               .x = device_pointer<const void>(x),
                               .values = device_pointer<uint8_t>(values),
                               .scales = device_pointer<float>(scales),
                               .num = num_experts,
                               .height = height,
                               .width = width,
                               .transposed = transposed},
                              stream_handle(stream));
      },
      "x", "values", "scales", "num_experts", "height", "width", "transposed", "dtype", "stream");
}

}  // namespace megacore::bindings
