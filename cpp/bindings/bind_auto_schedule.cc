#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "megacore/base/check.h"
#include "megacore/pipeline/search/auto_schedule.h"

namespace megacore::bindings {
namespace {

namespace py = pybind11;
using namespace py::literals;
using namespace megacore::pipeline;

using NoGil = py::call_guard<py::gil_scoped_release>;

Placement placement_of(const std::string& name, int num_ranks, int num_chunks) {
  if (name == "loop") return Placement::loop({.num_ranks = num_ranks, .num_chunks = num_chunks});
  MC_REQUIRE(name == "v", "placement must be 'loop' or 'v', got '{}'", name);
  MC_REQUIRE(num_chunks == 2, "num_chunks is {}; a V has 2 stages per rank", num_chunks);
  return Placement::v({.num_ranks = num_ranks});
}

}  // namespace

void bind_auto_schedule(pybind11::module_& module) {
  py::native_enum<Effort>(module, "Effort", "enum.IntEnum")
      .value("FAST", Effort::kFast)
      .value("THOROUGH", Effort::kThorough)
      .finalize();
  py::class_<Certificate>(module, "Certificate")
      .def_readonly("makespan", &Certificate::makespan)
      .def_readonly("bound", &Certificate::bound)
      .def_property_readonly("gap", &Certificate::gap)
      .def_readonly("is_optimal", &Certificate::is_optimal)
      .def_readonly("winner", &Certificate::winner)
      .def_property_readonly("named",
                             [](const Certificate& certificate) {
                               py::dict named;
                               for (const auto& [name, makespan] : certificate.named) {
                                 named[py::str(name)] = makespan;
                               }
                               return named;
                             })
      .def_readonly("peak_memory", &Certificate::peak_memory)
      .def_readonly("num_scheduled", &Certificate::num_scheduled);
  module.def(
      "auto_schedule",
      [](const std::string& placement, int num_ranks, int num_chunks, int num_microbatches,
         bool split_backward, std::vector<int64_t> memory_limit,
         std::vector<int64_t> activation_size, std::vector<double> forward,
         std::vector<double> backward_input, std::vector<double> backward_weight, double send,
         double overlap, Effort effort) {
        AutoSchedule result =
            auto_schedule({.placement = placement_of(placement, num_ranks, num_chunks),
                           .num_microbatches = num_microbatches,
                           .costs = {.forward = std::move(forward),
                                     .backward_input = std::move(backward_input),
                                     .backward_weight = std::move(backward_weight),
                                     .send = send,
                                     .overlap = overlap},
                           .split_backward = split_backward,
                           .memory_limit = std::move(memory_limit),
                           .activation_size = std::move(activation_size)},
                          effort);
        return std::tuple(std::move(result.schedule), std::move(result.certificate));
      },
      py::kw_only(), "placement"_a, "num_ranks"_a, "num_chunks"_a, "num_microbatches"_a,
      "split_backward"_a, "memory_limit"_a, "activation_size"_a, "forward"_a, "backward_input"_a,
      "backward_weight"_a, "send"_a, "overlap"_a, "effort"_a, NoGil());
}

}  // namespace megacore::bindings
