// Walks one rank's program and refuses every step that is out of turn.
//
//   StateMachine machine(program);
//   while (const ProgramStep* step = machine.next()) {
//     machine.start(step->action);
//     ...                                // run it
//     machine.complete(step->action);
//   }
//
// Not thread-safe: one thread drives it.

#pragma once

#include <cstddef>
#include <string>

#include "megacore/pipeline/program/lowering.h"

namespace megacore::pipeline {

class StateMachine {
 public:
  explicit StateMachine(Program program);

  const Program& program() const { return program_; }
  // Index of the next step; the number of steps at the end.
  size_t position() const { return position_; }
  bool is_running() const { return running_; }

  // The step to start next, or the one that runs; nullptr at the end of the program.
  const ProgramStep* next() const;

  // Throws std::logic_error unless `action` is the next one and no action runs. The message names
  // the position, the action expected and the one given.
  void start(const Action& action);

  // Throws std::logic_error unless `action` is the one that runs.
  void complete(const Action& action);

  // Back to the first step, wherever the machine stands: for the next training step, or after an
  // error in the middle of one.
  void reset();

 private:
  void require(bool legal, const char* verb, const Action& action) const;

  Program program_;
  size_t position_ = 0;
  bool running_ = false;
};

}  // namespace megacore::pipeline
