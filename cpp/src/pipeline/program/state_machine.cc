#include "megacore/pipeline/program/state_machine.h"

#include <stdexcept>
#include <utility>

#include "megacore/base/check.h"

namespace megacore::pipeline {

StateMachine::StateMachine(Program program) : program_(std::move(program)) {}

const ProgramStep* StateMachine::next() const {
  return position_ < program_.steps.size() ? &program_.steps[position_] : nullptr;
}

void StateMachine::start(const Action& action) {
  const ProgramStep* step = next();
  require(!running_ && step != nullptr && step->action == action, "start", action);
  running_ = true;
}

void StateMachine::complete(const Action& action) {
  require(running_ && program_.steps[position_].action == action, "complete", action);
  running_ = false;
  ++position_;
}

void StateMachine::reset() {
  position_ = 0;
  running_ = false;
}

void StateMachine::require(bool legal, const char* verb, const Action& action) const {
  if (legal) return;
  const ProgramStep* step = next();
  const std::string expected =
      step == nullptr
          ? "nothing more: the program is finished"
          : base::format_text("{}{}", running_ ? "complete " : "start ", to_text(step->action));
  throw std::logic_error(base::format_text("rank {}, position {} of {}: expected {}, got {} {}",
                                           program_.rank, position_, program_.steps.size(),
                                           expected, verb, to_text(action)));
}

}  // namespace megacore::pipeline
