#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bindings.h"
#include "megacore/graph/capture_plan.h"
#include "megacore/graph/order.h"

namespace py = pybind11;

namespace megacore::bindings {
namespace {

using graph::BufferUse;
using graph::Capture;
using graph::CapturePlan;
using graph::Role;
using graph::StepKind;

void bind_graph_values(py::module_& module) {
  py::native_enum<StepKind>(module, "StepKind", "enum.IntEnum")
      .value("FORWARD", StepKind::kForward)
      .value("BACKWARD", StepKind::kBackward)
      .value("BACKWARD_WEIGHT", StepKind::kBackwardWeight)
      .finalize();
  py::native_enum<Role>(module, "BufferRole", "enum.IntEnum")
      .value("INPUT", Role::kInput)
      .value("OUTPUT", Role::kOutput)
      .value("OUTPUT_GRAD", Role::kOutputGrad)
      .value("INPUT_GRAD", Role::kInputGrad)
      .value("KEPT", Role::kKept)
      .finalize();
  py::class_<Capture>(module, "Capture")
      .def_readonly("kind", &Capture::kind)
      .def_readonly("layer", &Capture::layer)
      .def_readonly("chunk", &Capture::chunk)
      .def_readonly("slot", &Capture::slot)
      .def(
          "buffer",
          [](const Capture& self, Role role) {
            return self.buffers[static_cast<std::size_t>(role)];
          },
          py::arg("role"));
  py::class_<BufferUse>(module, "BufferUse")
      .def_readonly("role", &BufferUse::role)
      .def_readonly("buffer", &BufferUse::buffer)
      .def_readonly("layer", &BufferUse::layer)
      .def_readonly("microbatch", &BufferUse::microbatch)
      .def_readonly("written", &BufferUse::written)
      .def_readonly("last_read", &BufferUse::last_read);
}

std::vector<int64_t> replays(const CapturePlan& plan, int64_t position) {
  const auto num_steps = static_cast<int64_t>(plan.order.steps.size());
  if (position < 0 || position >= num_steps) {
    throw py::index_error("order position " + std::to_string(position) + " is not in 0.." +
                          std::to_string(num_steps - 1));
  }
  const auto at = static_cast<std::size_t>(position);
  return {plan.replay.begin() + plan.replay_start[at],
          plan.replay.begin() + plan.replay_start[at + 1]};
}

}  // namespace

void bind_graph(py::module_& module) {
  bind_graph_values(module);
  py::class_<CapturePlan>(module, "CapturePlan")
      .def_property_readonly("num_chunks", [](const CapturePlan& p) { return p.order.num_chunks; })
      .def_property_readonly("num_microbatches",
                             [](const CapturePlan& p) { return p.order.num_microbatches; })
      .def_property_readonly("num_steps", [](const CapturePlan& p) { return p.order.steps.size(); })
      .def_property_readonly("order", [](const CapturePlan& p) { return order_text(p.order); })
      .def_readonly("captures", &CapturePlan::captures)
      .def_readonly("uses", &CapturePlan::uses)
      .def_readonly("slots_per_chunk", &CapturePlan::slots_per_chunk)
      .def_readonly("peak_per_chunk", &CapturePlan::peak_per_chunk)
      .def("replays", &replays, py::arg("position"))
      .def(
          "buffer_signatures",
          [](const CapturePlan& p, Role role) {
            return p.buffer_signature[static_cast<std::size_t>(role)];
          },
          py::arg("role"));
  module.def(
      "plan_capture",
      [](const std::vector<double>& order, const std::vector<int64_t>& layers_per_chunk,
         const std::vector<int64_t>& input_signature, const std::vector<int64_t>& output_signature,
         const std::string& reuse) {
        const graph::CaptureSpec spec = {.layers_per_chunk = layers_per_chunk,
                                         .input_signature = input_signature,
                                         .output_signature = output_signature,
                                         .reuse = graph::reuse_named(reuse)};
        const py::gil_scoped_release release;
        return graph::plan_capture(graph::parse_order(order), spec);
      },
      py::arg("order"), py::kw_only(), py::arg("layers_per_chunk"), py::arg("input_signature"),
      py::arg("output_signature"), py::arg("reuse"));
}

}  // namespace megacore::bindings
