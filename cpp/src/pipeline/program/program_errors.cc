#include "program/program_errors.h"

#include <span>
#include <stdexcept>

#include "megacore/base/check.h"

namespace megacore::pipeline {

std::string program_report(const Programs& programs,
                           const std::vector<Mark>& marks,
                           const std::string& text) {
  std::vector<std::vector<Action>> actions;
  for (int rank = 0; rank < programs.num_ranks(); ++rank) {
    const Program& program = programs.of(rank);
    auto& row = actions.emplace_back();
    row.reserve(program.steps.size());
    for (const ProgramStep& step : program.steps) row.push_back(step.action);
  }
  const std::vector<std::span<const Action>> rows(actions.begin(), actions.end());
  return base::format_text("the programs are not valid: {}\n{}", text, marked_table(rows, marks));
}

void refuse(const Programs& programs, const std::vector<Mark>& marks, const std::string& text) {
  throw std::invalid_argument(program_report(programs, marks, text));
}

void refuse_step(const Programs& programs, int rank, int64_t position, const std::string& text) {
  const Action action = programs.of(rank).steps[static_cast<size_t>(position)].action;
  refuse(programs, {{rank, position}},
         base::format_text("rank {}, position {}: {} {}", rank, position, to_text(action), text));
}

}  // namespace megacore::pipeline
