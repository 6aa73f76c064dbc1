#include <pybind11/numpy.h>

#include <cstdint>

#include "bindings.h"
#include "megacore/base/normal.h"

namespace py = pybind11;

namespace megacore::bindings {

void bind_random(py::module_& module) {
  module.def(
      "fill_normal",
      [](py::array_t<float, py::array::c_style>& out, uint64_t key, int64_t first, int64_t stride,
         float standard_deviation, int num_threads) {
        MC_REQUIRE(out.ndim() == 2, "out must have 2 dimensions, got {}", out.ndim());
        MC_REQUIRE(num_threads >= 1, "num_threads must be at least 1, got {}", num_threads);
        const base::NormalStretches stretches = {
            .count = out.shape(0), .length = out.shape(1), .first = first, .stride = stride};
        float* numbers = out.mutable_data();
        const py::gil_scoped_release released;
        base::fill_normal(numbers, stretches, key, standard_deviation, num_threads);
      },
      py::arg("out").noconvert(), py::kw_only(), py::arg("key"), py::arg("first"),
      py::arg("stride"), py::arg("standard_deviation"), py::arg("num_threads"));
}

}  // namespace megacore::bindings
