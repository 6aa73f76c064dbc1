#include "megacore/base/text.h"
#include "megacore/pipeline/program/lowering.h"

namespace megacore::pipeline {
namespace {

using base::append_number;

constexpr std::string_view kOverlap = "OVERLAP_F_B";

// What is noted on a step, behind its action.
void append_notes(const ProgramStep& step, std::string& text) {
  if (step.peer >= 0) {
    text += is_send(step.action.kind) ? "->" : "<-";
    append_number(step.peer, text);
    text += '#';
    append_number(step.sequence, text);
  }
  if (step.slot < 0 && !step.drops_activations) return;
  text += '[';
  if (step.slot >= 0) append_number(step.slot, text);
  if (step.drops_activations) text += step.slot >= 0 ? ",dropped" : "dropped";
  text += ']';
}

}  // namespace

std::string to_text(const Program& program, ProgramLevel level) {
  const bool notes = level == ProgramLevel::kResources;
  const bool pairs = level != ProgramLevel::kData;
  const auto& steps = program.steps;
  std::string text;
  for (size_t i = 0; i < steps.size(); ++i) {
    const ProgramStep& step = steps[i];
    if (level == ProgramLevel::kCompute && !is_compute(step.action.kind)) continue;
    const bool second = pairs && i > 0 && steps[i - 1].starts_pair;
    const bool in_batch = notes && step.batch >= 0;
    if (!text.empty()) text += second ? ';' : ' ';
    if (pairs && step.starts_pair) text += '(';
    if (in_batch && (i == 0 || steps[i - 1].batch != step.batch)) text += '{';
    append_text(step.action, text);
    if (notes) append_notes(step, text);
    if (in_batch && (i + 1 == steps.size() || steps[i + 1].batch != step.batch)) text += '}';
    if (second) {
      text += ')';
      text += kOverlap;
    }
  }
  return text;
}

}  // namespace megacore::pipeline
