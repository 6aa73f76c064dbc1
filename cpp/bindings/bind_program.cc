#include <pybind11/native_enum.h>
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "megacore/base/check.h"
#include "megacore/pipeline/program/lowering.h"
#include "megacore/pipeline/program/passes.h"
#include "megacore/pipeline/program/state_machine.h"
#include "megacore/pipeline/program/validate_programs.h"

namespace megacore::bindings {
namespace {

namespace py = pybind11;
using namespace py::literals;
using namespace megacore::pipeline;

using NoGil = py::call_guard<py::gil_scoped_release>;

// One field of every step, in order.
template <typename Field>
auto step_fields(Field ProgramStep::* field) {
  return [field](const Program& program) {
    std::vector<Field> values;
    values.reserve(program.steps.size());
    for (const ProgramStep& step : program.steps) values.push_back(step.*field);
    return values;
  };
}

// The positions of the steps that have a mark.
auto marked_steps(bool ProgramStep::* mark) {
  return [mark](const Program& program) {
    std::vector<int64_t> positions;
    for (size_t i = 0; i < program.steps.size(); ++i) {
      if (program.steps[i].*mark) positions.push_back(static_cast<int64_t>(i));
    }
    return positions;
  };
}

// The value whose name is `text`, among those of an enumeration in its order.
template <typename Enum, typename Names>
Enum named(const std::string& text, const Names& names, const char* what) {
  std::string choices;
  size_t i = 0;
  for (const auto& name : names) {
    if (text == name) return static_cast<Enum>(i);
    choices += base::concat(i++ == 0 ? "'" : ", '", name, "'");
  }
  throw std::invalid_argument(base::concat(what, " is '", text, "'; it must be one of ", choices));
}

constexpr std::array<std::string_view, 3> kLevelText = {"compute", "data", "resources"};
constexpr std::array<std::string_view, 2> kPoolText = {"per_chunk", "shared"};

void bind_program_class(py::module_& module) {
  py::class_<Program>(
      module,
      "Program",
      "One rank's actions with sends and receives, in execution order; iterate over "
      "`actions`. `peers` holds the rank at the other end (-1: not a transfer), "
      "`acknowledged` how many sends to that rank a receive proves received, `sequences` the "
      "numbers of messages in their channels, `slots` and `batches` what passes have assigned "
      "(-1: nothing). `overlaps` and `dropped` are positions: of forwards that run together with "
      "the next compute action, and of forwards that keep no activations.")
      .def_readonly("rank", &Program::rank)
      .def_readonly("num_microbatches", &Program::num_microbatches)
      .def_readonly("is_forward_only", &Program::forward_only)
      .def_property_readonly("is_in_order",
                             [](const Program& p) { return p.receives == Receives::kInOrder; })
      .def_property_readonly("num_ranks", [](const Program& p) { return p.placement.num_ranks(); })
      .def_property_readonly("num_stages",
                             [](const Program& p) { return p.placement.num_stages(); })
      .def_property_readonly("num_chains",
                             [](const Program& p) { return p.placement.num_chains(); })
      .def_property_readonly("stages",
                             [](const Program& p) {
                               const auto stages = p.placement.stages_of(p.rank);
                               return std::vector<int32_t>(stages.begin(), stages.end());
                             })
      .def_property_readonly("actions", step_fields(&ProgramStep::action))
      .def_property_readonly("peers", step_fields(&ProgramStep::peer))
      .def_property_readonly("acknowledged", step_fields(&ProgramStep::acknowledged))
      .def_property_readonly("sequences", step_fields(&ProgramStep::sequence))
      .def_property_readonly("slots", step_fields(&ProgramStep::slot))
      .def_property_readonly("batches", step_fields(&ProgramStep::batch))
      .def_property_readonly("overlaps", marked_steps(&ProgramStep::starts_pair))
      .def_property_readonly("dropped", marked_steps(&ProgramStep::drops_activations))
      .def("slot_counts",
           &count_slots,
           NoGil(),
           "How many buffer slots it has. ValueError without slots.")
      .def("forward_only",
           py::overload_cast<const Program&>(&forward_only),
           NoGil(),
           "The same program without backward and gradient messages, for evaluation.")
      .def(
          "to_text",
          [](const Program& program, const std::string& level) {
            return to_text(program, named<ProgramLevel>(level, kLevelText, "level"));
          },
          "level"_a = "data",
          NoGil(),
          "The steps, separated by blanks: 'compute' shows compute actions only, 'data' all steps, "
          "'resources' also message numbers, slots and batches.")
      .def("__len__", [](const Program& p) { return p.steps.size(); })
      .def(py::self == py::self);
  py::class_<SlotCounts>(
      module,
      "SlotCounts",
      "Buffer slots of a rank by pool: one per chunk, or one in all. `graph_pairs` is how many "
      "pairs of a forward and a backward a capture as CUDA graphs needs.")
      .def_readonly("activations", &SlotCounts::activations)
      .def_readonly("inputs", &SlotCounts::inputs)
      .def_readonly("gradients", &SlotCounts::gradients)
      .def_readonly("graph_pairs", &SlotCounts::graph_pairs);
}

void bind_lowering(py::module_& module) {
  module.def(
      "lower",
      [](const Schedule& schedule,
         bool in_order,
         int ahead,
         std::optional<std::pair<int, int>> recompute,
         bool parameter_sync,
         bool releases,
         bool batches,
         std::optional<std::string> slots) {
        LoweringOptions options{.receives = in_order ? Receives::kInOrder : Receives::kAhead,
                                .ahead = ahead,
                                .recompute = {},
                                .parameter_sync = parameter_sync,
                                .releases = releases,
                                .batches = batches,
                                .slots = {}};
        if (recompute) options.recompute = {.keep = recompute->first, .window = recompute->second};
        if (slots) options.slots = named<SlotPools>(*slots, kPoolText, "slots");
        return lower(schedule, options);
      },
      "schedule"_a,
      py::kw_only(),
      "in_order"_a,
      "ahead"_a,
      "recompute"_a,
      "parameter_sync"_a,
      "releases"_a,
      "batches"_a,
      "slots"_a,
      NoGil());
  module.def("programs_from_actions", &programs_from_actions, "schedule"_a, "rows"_a, NoGil());
  module.def(
      "validate_programs",
      [](const std::vector<Program>& programs, const std::optional<std::string>& transport) {
        if (!transport) return validate_programs(programs);
        const Transport chosen = named<Transport>(*transport, kTransportText, "transport");
        validate_programs(programs, {&chosen, 1});
      },
      "programs"_a,
      "transport"_a = py::none(),
      NoGil(),
      "Check the programs of all ranks together: everything is computed and communicated once and "
      "in order, buffers are used while they are theirs, and no rank waits forever.\n\n"
      "`transport` says which transfers of a rank share a queue: 'per_channel' (one queue per "
      "ordered pair of ranks), 'per_pair', 'per_direction' (one for activations, one for "
      "gradients) or 'per_rank'. By default what the programs were made for. ValueError "
      "otherwise.");
  module.def(
      "transport_report",
      [](const std::vector<Program>& programs) {
        const std::vector<std::string> report = transport_report(programs);
        std::vector<std::pair<std::string, std::optional<std::string>>> rows;
        for (size_t i = 0; i < report.size(); ++i) {
          rows.emplace_back(kTransportText[i],
                            report[i].empty() ? std::nullopt : std::optional(report[i]));
        }
        return rows;
      },
      "programs"_a,
      NoGil());
}

void bind_state_machine(py::module_& module) {
  py::class_<StateMachine>(module,
                           "StateMachine",
                           "Walks a program; a step out of turn is a RuntimeError that names the "
                           "position, the action expected and the one given.")
      .def(py::init<Program>(), "program"_a)
      .def_property_readonly("position", &StateMachine::position)
      .def_property_readonly("is_running", &StateMachine::is_running)
      .def(
          "next",
          [](const StateMachine& machine) -> std::optional<Action> {
            const ProgramStep* step = machine.next();
            return step == nullptr ? std::nullopt : std::optional(step->action);
          },
          "The action to start next, or the one that runs; None at the end.")
      .def("start", &StateMachine::start, "action"_a)
      .def("complete", &StateMachine::complete, "action"_a)
      .def("reset", &StateMachine::reset, "Back to the first step, from anywhere.");
}

}  // namespace

void bind_program(py::module_& module) {
  bind_program_class(module);
  bind_lowering(module);
  bind_state_machine(module);
}

}  // namespace megacore::bindings
