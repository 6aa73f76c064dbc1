#include <optional>
#include <utility>

#include "megacore/base/check.h"
#include "megacore/pipeline/program/lowering.h"
#include "program/messages.h"

namespace megacore::pipeline {
namespace {

// The step of an action; a send or receive that has no other end keeps -1.
ProgramStep step_of(const Action& action, const Placement& placement) {
  if (!is_transfer(action.kind)) return {.action = action};
  const std::optional<ProgramStep> step = is_send(action.kind)
                                              ? send_of(maker_of(action), placement)
                                              : receive_of(reader_of(action), placement);
  return {.action = action, .peer = step ? step->peer : -1};
}

}  // namespace

std::vector<Program> programs_from_actions(const Schedule& schedule,
                                           const std::vector<std::vector<Action>>& rows) {
  std::vector<Program> programs;
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    Program& program = programs.emplace_back(Program{.rank = static_cast<int>(rank),
                                                     .placement = schedule.placement,
                                                     .num_microbatches = schedule.num_microbatches,
                                                     .forward_only = schedule.forward_only,
                                                     .receives = Receives::kAhead,
                                                     .steps = {}});
    for (const Action& action : rows[rank]) {
      MC_REQUIRE(action.stage >= 0 && action.stage < schedule.num_stages() &&
                     action.microbatch >= 0 && action.microbatch < schedule.num_microbatches,
                 "rank {}, position {}: {} is outside the {} stages and {} microbatches", rank,
                 program.steps.size(), to_text(action), schedule.num_stages(),
                 schedule.num_microbatches);
      program.steps.push_back(step_of(action, schedule.placement));
    }
  }
  return programs;
}

}  // namespace megacore::pipeline
