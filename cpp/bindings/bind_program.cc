#include <pybind11/native_enum.h>
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "megacore/pipeline/program/lowering.h"
#include "megacore/pipeline/program/recompute.h"
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

void bind_program_class(py::module_& module) {
  py::class_<Program>(
      module, "Program",
      "One rank's actions with sends and receives, in execution order; iterate over "
      "`actions`. `peers` holds the rank at the other end (-1: not a transfer), "
      "`acknowledged` how many sends to that rank a receive proves received. `overlaps` and "
      "`dropped` are positions: of forwards that run together with the next compute action, and "
      "of forwards that keep no activations.")
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
      .def_property_readonly("overlaps", marked_steps(&ProgramStep::starts_pair))
      .def_property_readonly("dropped", marked_steps(&ProgramStep::drops_activations))
      .def("forward_only", py::overload_cast<const Program&>(&forward_only), NoGil(),
           "This rank's program of `Schedule.forward_only`, with receives ahead as here, for "
           "evaluation.")
      .def(
          "to_text", [](const Program& program) { return to_text(program); }, NoGil(),
          "The actions, separated by blanks.")
      .def("__len__", [](const Program& p) { return p.steps.size(); })
      .def("__repr__",
           [](const Program& p) {
             return "<Program of rank " + std::to_string(p.rank) + " of " +
                    std::to_string(p.placement.num_ranks()) + ": " +
                    std::to_string(p.steps.size()) + " actions, " +
                    std::to_string(p.num_microbatches) + " microbatches>";
           })
      .def(py::self == py::self);
}

// Makes programs rank by rank, with recomputation if it is given as (keep, window).
class Maker {
 public:
  Maker(const Schedule& schedule,
        bool in_order,
        int ahead,
        std::optional<std::pair<int, int>> recompute)
      : lowering_(schedule, in_order ? Receives::kInOrder : Receives::kAhead, ahead),
        recompute_(recompute) {}

  Program program(int rank) const {
    Program program = lowering_.program(rank);
    if (!recompute_) return program;
    const auto [keep, window] = *recompute_;
    return add_recompute(std::move(program), {.keep = keep, .window = window});
  }

 private:
  Lowering lowering_;
  std::optional<std::pair<int, int>> recompute_;
};

void bind_lowering(py::module_& module) {
  module.def(
      "lower",
      [](const Schedule& schedule, bool in_order, int ahead,
         std::optional<std::pair<int, int>> recompute) {
        const Maker maker(schedule, in_order, ahead, recompute);
        std::vector<Program> programs;
        for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
          programs.push_back(maker.program(rank));
        }
        return programs;
      },
      "schedule"_a, py::kw_only(), "in_order"_a, "ahead"_a, "recompute"_a, NoGil());
  module.def(
      "lower_rank",
      [](const Schedule& schedule, int rank, bool in_order, int ahead,
         std::optional<std::pair<int, int>> recompute, bool prove) {
        const Maker maker(schedule, in_order, ahead, recompute);
        if (!prove) return maker.program(rank);
        std::optional<Program> mine;
        std::optional<Program> other;
        validate_programs(schedule, in_order ? Receives::kInOrder : Receives::kAhead,
                          [&](int asked) -> const Program& {
                            return (asked == rank ? mine : other).emplace(maker.program(asked));
                          });
        return std::move(mine).value();
      },
      "schedule"_a, "rank"_a, py::kw_only(), "in_order"_a, "ahead"_a, "recompute"_a, "prove"_a,
      NoGil());
  module.def("programs_from_actions", &programs_from_actions, "schedule"_a, "rows"_a, NoGil());
  module.def(
      "validate_programs",
      [](const std::vector<Program>& programs) { validate_programs(programs); }, "programs"_a,
      NoGil(),
      "Check the programs of all ranks together: everything is computed and communicated once and "
      "in order, activations that were dropped are recomputed, and no rank waits forever, with a "
      "queue per ordered pair of ranks if receives are ahead and one per rank if they are in "
      "order. ValueError otherwise.");
}

void bind_state_machine(py::module_& module) {
  py::class_<StateMachine>(module, "StateMachine",
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
