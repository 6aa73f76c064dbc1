#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "megacore/base/check.h"
#include "megacore/pipeline/bounds/lower_bound.h"
#include "megacore/pipeline/schedules/schedule_catalog.h"
#include "megacore/pipeline/search/auto_schedule.h"

namespace megacore::bindings {
namespace {

namespace py = pybind11;
using namespace py::literals;
using namespace megacore::pipeline;

using NoGil = py::call_guard<py::gil_scoped_release>;

std::string name_of_placement(PlacementKind kind) {
  switch (kind) {
    case PlacementKind::kLoop:
      return "loop";
    case PlacementKind::kV:
      return "v";
    default:
      return "bidirectional";
  }
}

Pairs pairs_of(const std::optional<std::string>& name) {
  if (!name) return Pairs::kNone;
  MC_REQUIRE(*name == "whole" || *name == "split",
             "pairs must be 'whole', 'split' or None, got '{}'", *name);
  return *name == "whole" ? Pairs::kWhole : Pairs::kSplit;
}

Placement placement_of(const std::string& name, int num_ranks, int num_chunks) {
  if (name == "loop") return Placement::loop({.num_ranks = num_ranks, .num_chunks = num_chunks});
  MC_REQUIRE(name == "v", "placement must be 'loop' or 'v', got '{}'", name);
  MC_REQUIRE(num_chunks == 2, "num_chunks is {}; a V has 2 stages per rank", num_chunks);
  return Placement::v({.num_ranks = num_ranks});
}

void bind_catalog(py::module_& module) {
  py::class_<ScheduleInfo>(module, "ScheduleInfo", "What is known of a named schedule.")
      .def_readonly("name", &ScheduleInfo::name)
      .def_readonly("summary", &ScheduleInfo::summary)
      .def_readonly("source", &ScheduleInfo::source)
      .def_readonly("constraints", &ScheduleInfo::constraints)
      .def_property_readonly(
          "placement", [](const ScheduleInfo& info) { return name_of_placement(info.placement); })
      .def_readonly("num_chunks", &ScheduleInfo::num_chunks)
      .def_readonly("splits_backward", &ScheduleInfo::splits_backward)
      .def_readonly("takes_group_size", &ScheduleInfo::takes_group_size)
      .def_readonly("takes_warmup_multiplier", &ScheduleInfo::takes_warmup_multiplier)
      .def_readonly("takes_pairs", &ScheduleInfo::takes_pairs);
  module.def("schedule_catalog", [] {
    const auto catalog = schedule_catalog();
    return std::vector<ScheduleInfo>(catalog.begin(), catalog.end());
  });
  module.def(
      "build_schedule",
      [](const std::string& name, int num_ranks, int num_microbatches,
         std::optional<int> num_chunks, std::optional<int> group_size,
         std::optional<int> warmup_multiplier, const std::optional<std::string>& pairs) {
        return build_schedule(name, {.num_ranks = num_ranks,
                                     .num_microbatches = num_microbatches,
                                     .num_chunks = num_chunks,
                                     .group_size = group_size,
                                     .warmup_multiplier = warmup_multiplier,
                                     .pairs = pairs_of(pairs)});
      },
      "name"_a, py::kw_only(), "num_ranks"_a, "num_microbatches"_a, "num_chunks"_a, "group_size"_a,
      "warmup_multiplier"_a, "pairs"_a, NoGil());
}

void bind_auto_schedule(py::module_& module) {
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
  def_kernel(
      module, "auto_schedule",
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
      "placement", "num_ranks", "num_chunks", "num_microbatches", "split_backward", "memory_limit",
      "activation_size", "forward", "backward_input", "backward_weight", "send", "overlap",
      "effort");
}

}  // namespace

void bind_schedule_catalog(pybind11::module_& module) {
  bind_catalog(module);
  bind_auto_schedule(module);
  py::class_<LowerBound>(module, "LowerBound")
      .def_readonly("value", &LowerBound::value)
      .def_property_readonly("reason",
                             [](const LowerBound& bound) { return name_of(bound.reason); })
      .def_property_readonly("explanation",
                             [](const LowerBound& bound) { return to_text(bound.reason); })
      .def_property_readonly("by_reason", [](const LowerBound& bound) {
        py::dict values;
        for (size_t i = 0; i < kNumBoundReasons; ++i) {
          const auto reason = static_cast<BoundReason>(i);
          const bool may_be_missing =
              reason == BoundReason::kDeadlines || reason == BoundReason::kExhaustion;
          if (may_be_missing && bound.by_reason[i] == 0.0) continue;
          values[py::str(name_of(reason))] = bound.by_reason[i];
        }
        return values;
      });
  module.def(
      "lower_bound",
      [](const Schedule& schedule, std::vector<double> forward, std::vector<double> backward_input,
         std::vector<double> backward_weight, double send,
         std::optional<std::vector<int64_t>> memory_limit) {
        BoundProblem problem = problem_of(schedule, {.forward = std::move(forward),
                                                     .backward_input = std::move(backward_input),
                                                     .backward_weight = std::move(backward_weight),
                                                     .send = send});
        const double makespan = simulate(schedule, problem.costs).makespan;
        if (memory_limit) problem.memory_limit = std::move(*memory_limit);
        return tightened(lower_bound(problem), problem, makespan);
      },
      "schedule"_a, py::kw_only(), "forward"_a, "backward_input"_a, "backward_weight"_a, "send"_a,
      "memory_limit"_a, NoGil());
}

}  // namespace megacore::bindings
