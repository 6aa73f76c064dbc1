// Programs for evaluation.

#include <utility>
#include <vector>

#include "megacore/pipeline/program/lowering.h"
#include "megacore/pipeline/program/passes.h"

namespace megacore::pipeline {
namespace {

// The passes that mean something without backward.
Program with_passes(Program program, const Passes& passes) {
  if (passes.batches) program = batch_transfers(std::move(program));
  if (passes.parameter_sync) program = add_parameter_sync(std::move(program));
  if (passes.releases) program = add_releases(std::move(program));
  if (passes.slots) program = assign_slots(std::move(program), *passes.slots);
  return program;
}

}  // namespace

Program forward_only(const Program& program) {
  const Schedule schedule = {.name = "",
                             .placement = program.placement,
                             .num_microbatches = program.num_microbatches,
                             .actions = {},
                             .offsets = {}};
  std::vector<Program> programs = lower(forward_only(schedule), program.receives, program.ahead);
  return with_passes(std::move(programs[static_cast<size_t>(program.rank)]), program.passes);
}

}  // namespace megacore::pipeline
