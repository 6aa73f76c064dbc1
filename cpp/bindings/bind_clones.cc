#include <cstdint>

#include "bindings.h"
#include "megacore/moe/clone_exchange.h"

namespace py = pybind11;

namespace megacore::bindings {
namespace {

using moe::CloneExchange;
using moe::CloneLayout;
using moe::CloneTable;

void bind_clones_values(py::module_& module) {
  py::class_<CloneLayout>(module, "CloneLayout")
      .def(py::init(
               [](int64_t num_slots, int64_t fc1, int64_t fc2, int64_t fc1_grad, int64_t fc2_grad) {
                 return CloneLayout{.num_slots = num_slots,
                                    .weight_bytes = {fc1, fc2},
                                    .grad_bytes = {fc1_grad, fc2_grad}};
               }),
           py::kw_only(), py::arg("num_slots"), py::arg("fc1_bytes"), py::arg("fc2_bytes"),
           py::arg("fc1_grad_bytes"), py::arg("fc2_grad_bytes"))
      .def("bytes", &CloneLayout::bytes, py::arg("num_ranks"))
      .def("weights_offset", &CloneLayout::weights_offset, py::arg("num_ranks"),
           py::arg("projection"))
      .def("grads_offset", &CloneLayout::grads_offset, py::arg("num_ranks"), py::arg("projection"));
  py::class_<CloneTable>(module, "CloneTable")
      .def(py::init([](uintptr_t slot_expert, int64_t num_ranks, int64_t num_slots,
                       int64_t num_experts, int64_t position) {
             return CloneTable{.slot_expert = pointer<const int64_t>(slot_expert),
                               .num_ranks = num_ranks,
                               .num_slots = num_slots,
                               .num_experts = num_experts,
                               .position = position};
           }),
           py::kw_only(), py::arg("slot_expert"), py::arg("num_ranks"), py::arg("num_slots"),
           py::arg("num_experts"), py::arg("position"));
}

}  // namespace

void bind_clones(py::module_& module) {
  using no_gil = py::call_guard<py::gil_scoped_release>;
  bind_clones_values(module);
  module.attr("CLONE_WINDOW_PARTS") = CloneExchange::kWindowParts;
  py::class_<CloneExchange>(module, "CloneExchange")
      .def(py::init<parallel::HostWindow&, const CloneLayout&>(), py::arg("window"),
           py::arg("layout"), py::keep_alive<1, 2>())
      .def("open", &CloneExchange::open, no_gil())
      .def(
          "push",
          [](CloneExchange& self, int64_t projection, uintptr_t weights, const CloneTable& table) {
            self.push(projection, pointer<const std::byte>(weights), table);
          },
          py::kw_only(), py::arg("projection"), py::arg("weights"), py::arg("table"), no_gil())
      .def("wait_for_weights", &CloneExchange::wait_for_weights, py::arg("projection"), no_gil())
      .def("reserve_grads", &CloneExchange::reserve_grads, py::arg("projection"), no_gil())
      .def("offer_grads", &CloneExchange::offer_grads, py::arg("projection"), no_gil())
      .def(
          "collect",
          [](CloneExchange& self, int64_t projection, parallel::HostDtype dtype, uintptr_t total,
             const CloneTable& table) {
            self.collect(projection, dtype, pointer<std::byte>(total), table);
          },
          py::kw_only(), py::arg("projection"), py::arg("dtype"), py::arg("total"),
          py::arg("table"), no_gil());
}

}  // namespace megacore::bindings
