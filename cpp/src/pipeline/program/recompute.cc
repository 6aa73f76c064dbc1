#include "megacore/pipeline/program/recompute.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "megacore/base/check.h"
#include "program/pair_index.h"

namespace megacore::pipeline {
namespace {

// The largest number of pairs whose activations the rank holds at once.
int most_held(const Program& program) {
  int held = 0;
  int peak = 0;
  for (const ProgramStep& step : program.steps) {
    if (step.action.kind == ActionKind::kForward) peak = std::max(peak, ++held);
    if (frees_activation(step.action.kind)) --held;
  }
  return peak;
}

}  // namespace

Program add_recompute(Program program, const Recompute& recompute) {
  MC_REQUIRE(recompute.keep >= 0 && recompute.window >= 0,
             "keep is {} and window {}; both count forwards and must be at least 0", recompute.keep,
             recompute.window);
  if (program.forward_only) return program;
  const int window = recompute.window > 0 ? recompute.window : most_held(program);
  const PairIndex index(program);
  std::vector<uint8_t> dropped(index.size(), 0);
  std::vector<ProgramStep> steps;
  steps.reserve(program.steps.size());
  int64_t num_forwards = 0;
  for (ProgramStep& step : program.steps) {
    const Action& action = step.action;
    if (action.kind == ActionKind::kForward) {
      step.drops_activations = num_forwards++ % window >= recompute.keep;
      dropped[index.of(action)] = step.drops_activations ? 1 : 0;
    } else if (gives_input_gradient(action.kind) && dropped[index.of(action)] != 0) {
      // Before the pair, if the backward is the second half of one.
      const bool second = !steps.empty() && steps.back().starts_pair;
      const ProgramStep again{.action = {action.stage, ActionKind::kRecompute, action.microbatch}};
      steps.insert(steps.end() - (second ? 1 : 0), again);
    }
    steps.push_back(step);
  }
  program.steps = std::move(steps);
  return program;
}

}  // namespace megacore::pipeline
