#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "bindings.h"
#include "megacore/data/blend.h"

namespace py = pybind11;

namespace megacore::bindings {

void bind_data(py::module_& module) {
  using data::BlendOrder;
  py::class_<BlendOrder>(module, "BlendOrder")
      .def(py::init([](const std::vector<double>& weights) { return BlendOrder(weights); }),
           py::arg("weights"))
      .def(
          "take",
          [](BlendOrder& order, py::array_t<int16_t, py::array::c_style>& datasets,
             py::array_t<int64_t, py::array::c_style>& numbers) {
            const std::span out_datasets(datasets.mutable_data(),
                                         static_cast<size_t>(datasets.size()));
            const std::span out_numbers(numbers.mutable_data(),
                                        static_cast<size_t>(numbers.size()));
            const py::gil_scoped_release released;
            order.take(out_datasets, out_numbers);
          },
          py::arg("datasets").noconvert(), py::arg("numbers").noconvert())
      .def_property_readonly("counts", [](const BlendOrder& order) {
        std::vector<int64_t> counts(order.num_datasets());
        for (size_t i = 0; i < counts.size(); ++i) {
          counts[i] = order.count(i);
        }
        return counts;
      });
}

}  // namespace megacore::bindings
