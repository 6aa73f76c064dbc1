#include <pybind11/native_enum.h>
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "megacore/pipeline/bounds/critical_path.h"
#include "megacore/pipeline/layer_layout.h"
#include "megacore/pipeline/partition.h"
#include "megacore/pipeline/schedules/generators.h"
#include "megacore/pipeline/schedules/schedule_table.h"
#include "megacore/pipeline/simulate.h"
#include "megacore/pipeline/validate.h"

namespace megacore::bindings {
namespace {

namespace py = pybind11;
using namespace py::literals;
using namespace megacore::pipeline;

using NoGil = py::call_guard<py::gil_scoped_release>;

void bind_action(py::module_& module) {
  py::native_enum<ActionKind>(module, "ActionKind", "enum.IntEnum")
      .value("FORWARD", ActionKind::kForward)
      .value("BACKWARD", ActionKind::kBackward)
      .value("BACKWARD_INPUT", ActionKind::kBackwardInput)
      .value("BACKWARD_WEIGHT", ActionKind::kBackwardWeight)
      .value("SEND_FORWARD", ActionKind::kSendForward)
      .value("RECV_FORWARD", ActionKind::kRecvForward)
      .value("SEND_BACKWARD", ActionKind::kSendBackward)
      .value("RECV_BACKWARD", ActionKind::kRecvBackward)
      .value("RECOMPUTE", ActionKind::kRecompute)
      .finalize();
  py::class_<Action>(module, "Action", "One step of a pipeline rank; str() gives its text, 2F0.")
      .def(py::init<int32_t, ActionKind, int32_t>(), "stage"_a, "kind"_a, "microbatch"_a)
      .def_static("parse", &parse_action, "text"_a,
                  "The action with this text; the inverse of str().")
      .def_readonly("stage", &Action::stage)
      .def_readonly("kind", &Action::kind)
      .def_readonly("microbatch", &Action::microbatch)
      .def(py::self == py::self)
      .def("__hash__",
           [](const Action& a) {
             return py::hash(py::make_tuple(a.stage, static_cast<int>(a.kind), a.microbatch));
           })
      .def("__str__", [](const Action& a) { return to_text(a); })
      .def("__repr__", [](const Action& a) { return "Action.parse('" + to_text(a) + "')"; })
      .def("__reduce__", [](const Action& a) {
        return py::make_tuple(py::type::of<Action>(),
                              py::make_tuple(a.stage, a.kind, a.microbatch));
      });
}

void bind_schedule(py::module_& module) {
  py::class_<Timeline>(module, "Timeline")
      .def_readonly("makespan", &Timeline::makespan)
      .def_readonly("bubble_fraction", &Timeline::bubble_fraction)
      .def_readonly("busy", &Timeline::busy)
      .def_readonly("peak_in_flight", &Timeline::peak_in_flight)
      .def_readonly("exposed", &Timeline::exposed)
      .def_property_readonly("spans", [](const Timeline& timeline) {
        py::list spans;
        for (const TimedSpan& span : timeline.spans) {
          spans.append(py::make_tuple(span.start, span.end));
        }
        return spans;
      });
  py::class_<Schedule>(module, "Schedule")
      .def_static("from_text", &schedule_from_text, "text"_a, NoGil())
      .def_static("from_csv", &schedule_from_csv, "text"_a, py::kw_only(), "name"_a, NoGil())
      .def_readonly("name", &Schedule::name)
      .def_property_readonly("num_ranks", &Schedule::num_ranks)
      .def_property_readonly("num_stages", &Schedule::num_stages)
      .def_property_readonly("num_chunks",
                             [](const Schedule& s) { return s.placement.num_chunks(); })
      .def_property_readonly("num_chains",
                             [](const Schedule& s) { return s.placement.num_chains(); })
      .def_readonly("num_microbatches", &Schedule::num_microbatches)
      .def_readonly("is_forward_only", &Schedule::forward_only)
      .def(
          "stages",
          [](const Schedule& s, int rank) {
            const auto stages = s.placement.stages_of(rank);
            return std::vector<int32_t>(stages.begin(), stages.end());
          },
          "rank"_a)
      .def(
          "actions",
          [](const Schedule& s, int rank) {
            const auto actions = s.rank_actions(rank);
            return std::vector<Action>(actions.begin(), actions.end());
          },
          "rank"_a)
      .def("overlaps", &overlap_positions, "rank"_a)
      .def("order", &order_list, "rank"_a)
      .def("forward_only", py::overload_cast<const Schedule&>(&forward_only), NoGil())
      .def(
          "digest", [](const Schedule& s) { return static_cast<int64_t>(digest(s)); }, NoGil())
      .def("validate", &validate, NoGil())
      .def(
          "validate_memory",
          [](const Schedule& s, const std::vector<int64_t>& limits) { validate_memory(s, limits); },
          "limits"_a, NoGil())
      .def(
          "simulate",
          [](const Schedule& s, std::vector<double> forward, std::vector<double> backward_input,
             std::vector<double> backward_weight, double send, double overlap,
             const std::vector<double>& backward) {
            return simulate(s,
                            {.forward = std::move(forward),
                             .backward_input = std::move(backward_input),
                             .backward_weight = std::move(backward_weight),
                             .send = send,
                             .overlap = overlap},
                            backward);
          },
          py::kw_only(), "forward"_a, "backward_input"_a, "backward_weight"_a, "send"_a,
          "overlap"_a, "backward"_a = std::vector<double>{}, NoGil())
      .def("critical_path", &critical_path, "timeline"_a, NoGil())
      .def("to_text", py::overload_cast<const Schedule&>(&to_text), NoGil())
      .def("to_csv", &to_csv, NoGil())
      .def(py::self == py::self);
}

void bind_generators(py::module_& module) {
  module.def(
      "best_group_size",
      [](int num_ranks, int num_chunks, int num_microbatches) {
        return best_group_size({.num_ranks = num_ranks,
                                .num_chunks = num_chunks,
                                .num_microbatches = num_microbatches});
      },
      py::kw_only(), "num_ranks"_a, "num_chunks"_a, "num_microbatches"_a);
  module.def(
      "interleaved_warmup",
      [](int rank, int num_ranks, int num_chunks, int num_microbatches,
         std::optional<int> group_size, int warmup_multiplier, bool pairs) {
        return interleaved_warmup({.num_ranks = num_ranks,
                                   .num_chunks = num_chunks,
                                   .num_microbatches = num_microbatches,
                                   .group_size = group_size,
                                   .warmup_multiplier = warmup_multiplier,
                                   .pairs = pairs ? Pairs::kWhole : Pairs::kNone},
                                  rank);
      },
      "rank"_a, py::kw_only(), "num_ranks"_a, "num_chunks"_a, "num_microbatches"_a, "group_size"_a,
      "warmup_multiplier"_a, "pairs"_a);
  module.def(
      "schedule_table",
      [](int num_microbatches, int num_chunks, int group_size) {
        std::vector<std::tuple<int, int>> rows;
        for (const TableEntry& entry : schedule_table({.num_microbatches = num_microbatches,
                                                       .num_chunks = num_chunks,
                                                       .group_size = group_size})) {
          rows.emplace_back(entry.microbatch, entry.chunk);
        }
        return rows;
      },
      "num_microbatches"_a, "num_chunks"_a, "group_size"_a);
  module.def(
      "partition_layers",
      [](int num_layers, int num_ranks, int num_chunks, std::optional<int> first,
         std::optional<int> last, bool account_for_embedding, bool account_for_loss, bool is_v,
         std::optional<std::string> layout) {
        std::vector<std::tuple<int, int>> ranges;
        for (const LayerRange& range :
             partition_layers({.num_layers = num_layers,
                               .num_ranks = num_ranks,
                               .num_chunks = num_chunks,
                               .first = first,
                               .last = last,
                               .account_for_embedding = account_for_embedding,
                               .account_for_loss = account_for_loss,
                               .is_v = is_v,
                               .layout = std::move(layout)})) {
          ranges.emplace_back(range.begin, range.end);
        }
        return ranges;
      },
      "num_layers"_a, py::kw_only(), "num_ranks"_a, "num_chunks"_a, "first"_a, "last"_a,
      "account_for_embedding"_a, "account_for_loss"_a, "is_v"_a, "layout"_a);
  module.def("predictions_of_layout", &predictions_of_layout, "layout"_a);
}

}  // namespace

void bind_pipeline(pybind11::module_& module) {
  bind_action(module);
  bind_schedule(module);
  bind_generators(module);
}

}  // namespace megacore::bindings
