#include "program/program_errors.h"

#include <stdexcept>

#include "megacore/base/check.h"

namespace megacore::pipeline {

std::string program_report(Programs programs, const std::vector<Mark>& marks, std::string text) {
  std::vector<std::vector<Action>> actions;
  for (const Program& program : programs) {
    auto& row = actions.emplace_back();
    row.reserve(program.steps.size());
    for (const ProgramStep& step : program.steps) row.push_back(step.action);
  }
  const std::vector<std::span<const Action>> rows(actions.begin(), actions.end());
  return base::format_text("the programs are not valid: {}\n{}", text, marked_table(rows, marks));
}

void refuse(Programs programs, const std::vector<Mark>& marks, std::string text) {
  throw std::invalid_argument(program_report(programs, marks, std::move(text)));
}

void refuse_step(Programs programs, int rank, int64_t position, std::string text) {
  const ProgramStep& step =
      programs[static_cast<size_t>(rank)].steps[static_cast<size_t>(position)];
  refuse(
      programs, {{rank, position}},
      base::format_text("rank {}, position {}: {} {}", rank, position, to_text(step.action), text));
}

}  // namespace megacore::pipeline
