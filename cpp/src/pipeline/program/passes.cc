#include "megacore/pipeline/program/passes.h"

#include <algorithm>
#include <utility>

#include "megacore/base/check.h"
#include "program/lifetimes.h"

namespace megacore::pipeline {
namespace {

// Steps to insert, each with the index of the step that it stands before.
struct Insertion {
  size_t before;
  Action action;
};

// Insertions before one step keep their order.
std::vector<ProgramStep> merged(const std::vector<ProgramStep>& steps,
                                std::vector<Insertion> insertions) {
  const auto by_place = [](const Insertion& a, const Insertion& b) { return a.before < b.before; };
  if (!std::is_sorted(insertions.begin(), insertions.end(), by_place)) {
    std::stable_sort(insertions.begin(), insertions.end(), by_place);
  }
  std::vector<ProgramStep> result;
  result.reserve(steps.size() + insertions.size());
  auto next = insertions.begin();
  for (size_t i = 0; i <= steps.size(); ++i) {
    for (; next != insertions.end() && next->before == i; ++next) {
      result.push_back({.action = next->action});
    }
    if (i < steps.size()) result.push_back(steps[i]);
  }
  return result;
}

// The place behind a compute action, the sends that follow it, and the batch they are in.
size_t behind(const std::vector<ProgramStep>& steps, size_t position) {
  const auto belongs = [&](size_t i) {
    return is_send(steps[i].action.kind) ||
           (steps[i].batch >= 0 && steps[i].batch == steps[i - 1].batch);
  };
  ++position;
  while (position < steps.size() && belongs(position)) ++position;
  return position;
}

// The largest number of pairs whose activations the rank holds at once.
int peak_in_flight(const Program& program) {
  int held = 0;
  int peak = 0;
  for (const ProgramStep& step : program.steps) {
    if (step.action.kind == ActionKind::kForward) peak = std::max(peak, ++held);
    if (is_compute(step.action.kind) && reads_activation_last(step.action, program.forward_only)) {
      --held;
    }
  }
  return peak;
}

}  // namespace

Program add_parameter_sync(Program program) {
  const auto& steps = program.steps;
  const size_t num_chunks = program.placement.stages_of(program.rank).size();
  std::vector<uint8_t> seen(num_chunks, 0);
  std::vector<size_t> last_backward(num_chunks, steps.size());
  std::vector<Insertion> insertions;
  size_t previous = 0;  // the compute action, or pair, before the present one
  size_t start = 0;     // the present one
  for (size_t i = 0; i < steps.size(); ++i) {
    const Action& action = steps[i].action;
    if (!is_compute(action.kind)) continue;
    const bool second = i > 0 && steps[i - 1].starts_pair;
    if (!second) {
      previous = std::exchange(start, i);
    }
    const auto chunk = static_cast<size_t>(program.placement.chunk_of(action.stage));
    if (action.kind != ActionKind::kForward) {
      last_backward[chunk] = i;
    } else if (seen[chunk] == 0) {
      seen[chunk] = 1;
      insertions.push_back({previous, {action.stage, ActionKind::kGatherParams, kNoMicrobatch}});
    }
  }
  for (size_t chunk = 0; chunk < num_chunks && !program.forward_only; ++chunk) {
    if (last_backward[chunk] == steps.size()) continue;
    const int stage = program.placement.stages_of(program.rank)[chunk];
    insertions.push_back(
        {behind(steps, last_backward[chunk]), {stage, ActionKind::kReduceGrads, kNoMicrobatch}});
  }
  program.steps = merged(steps, std::move(insertions));
  program.passes.parameter_sync = true;
  return program;
}

Program add_recompute(Program program, const Recompute& recompute) {
  MC_REQUIRE(recompute.keep >= 0 && recompute.window >= 0,
             "keep is ",
             recompute.keep,
             " and window ",
             recompute.window,
             "; both count forwards and must be at least 0");
  program.passes.recompute = true;
  if (program.forward_only) return program;
  const int window = recompute.window > 0 ? recompute.window : peak_in_flight(program);
  const PairIndex index(program);
  std::vector<uint8_t> dropped(index.size(), 0);
  std::vector<Insertion> insertions;
  int64_t num_forwards = 0;
  for (size_t i = 0; i < program.steps.size(); ++i) {
    ProgramStep& step = program.steps[i];
    const Action& action = step.action;
    if (action.kind == ActionKind::kForward) {
      step.drops_activations = num_forwards++ % window >= recompute.keep;
      dropped[index.of(action)] = step.drops_activations ? 1 : 0;
    } else if (gives_input_gradient(action.kind) && dropped[index.of(action)] != 0) {
      const bool second = i > 0 && program.steps[i - 1].starts_pair;
      insertions.push_back(
          {second ? i - 1 : i, {action.stage, ActionKind::kRecompute, action.microbatch}});
    }
  }
  program.steps = merged(program.steps, std::move(insertions));
  return program;
}

Program add_releases(Program program) {
  std::vector<Insertion> insertions;
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const Action& action = program.steps[i].action;
    if (is_compute(action.kind) && reads_activation_last(action, program.forward_only)) {
      insertions.push_back(
          {behind(program.steps, i), {action.stage, ActionKind::kRelease, action.microbatch}});
    }
  }
  program.steps = merged(program.steps, std::move(insertions));
  program.passes.releases = true;
  return program;
}

Program batch_transfers(Program program) {
  MC_REQUIRE(program.receives == Receives::kInOrder,
             "the receives of rank ",
             program.rank,
             " are posted ahead; transfers can be batched when they are in order");
  auto& steps = program.steps;
  int32_t batch = 0;
  for (size_t begin = 0; begin < steps.size();) {
    size_t end = begin;
    while (end < steps.size() && is_transfer(steps[end].action.kind)) ++end;
    if (end - begin > 1) {
      for (size_t i = begin; i < end; ++i) steps[i].batch = batch;
      ++batch;
    }
    begin = end + 1;
  }
  program.passes.batches = true;
  return program;
}

std::vector<Program> lower(const Schedule& schedule, const LoweringOptions& options) {
  std::vector<Program> programs = lower(schedule, options.receives, options.ahead);
  for (Program& program : programs) {
    if (options.batches) program = batch_transfers(std::move(program));
    if (options.recompute) program = add_recompute(std::move(program), *options.recompute);
    if (options.parameter_sync) program = add_parameter_sync(std::move(program));
    if (options.releases) program = add_releases(std::move(program));
    if (options.slots) program = assign_slots(std::move(program), *options.slots);
  }
  return programs;
}

}  // namespace megacore::pipeline
