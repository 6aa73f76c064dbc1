#include <cstddef>
#include <cstdint>
#include <span>

#include "bindings.h"
#include "megacore/base/crc32.h"

namespace py = pybind11;

namespace megacore::bindings {

void bind_checksum(py::module_& module) {
  module.def(
      "crc32",
      [](const py::buffer& data, uint32_t crc) {
        const py::buffer_info bytes = data.request();
        const auto size = static_cast<size_t>(bytes.size * bytes.itemsize);
        const py::gil_scoped_release released;
        return base::crc32({static_cast<const std::byte*>(bytes.ptr), size}, crc);
      },
      py::arg("data"), py::arg("crc") = 0);
  module.def("crc32_combine", &base::crc32_combine, py::arg("first"), py::arg("second"),
             py::arg("num_bytes_second"));
  module.def("has_fast_crc32", &base::has_fast_crc32);
}

}  // namespace megacore::bindings
