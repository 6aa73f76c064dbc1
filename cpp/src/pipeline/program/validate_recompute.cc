#include <cstdint>
#include <string_view>
#include <vector>

#include "program/pair_index.h"
#include "program/program_errors.h"

namespace megacore::pipeline {
namespace {

// Walks one rank's program and follows the activations of every stage and microbatch.
class ActivationWalk {
 public:
  ActivationWalk(const Programs& programs, const Program& program)
      : programs_(programs),
        program_(program),
        pairs_(program_),
        state_(pairs_.size(), State::kAbsent) {}

  void check() {
    for (here_ = 0; here_ < program_.steps.size(); ++here_) {
      const ProgramStep& step = program_.steps[here_];
      if (step.action.kind == ActionKind::kRecompute) {
        recompute(step.action);
      } else if (is_compute(step.action.kind)) {
        compute(step);
      }
    }
  }

 private:
  enum class State : uint8_t { kAbsent, kKept, kDropped, kRead };

  void require(bool holds, std::string_view text) const {
    if (holds) return;
    refuse_step(programs_, program_.rank, static_cast<int64_t>(here_), std::string(text));
  }

  void compute(const ProgramStep& step) {
    State& state = state_[pairs_.of(step.action)];
    if (step.action.kind == ActionKind::kForward) {
      require(!step.drops_activations || !program_.forward_only,
              "drops activations in a program without backward");
      state = step.drops_activations ? State::kDropped : State::kKept;
      return;
    }
    require(state != State::kDropped,
            "reads activations that its forward dropped, and no RECOMPUTE stands before it");
    if (frees_activation(step.action.kind)) state = State::kRead;
  }

  void recompute(const Action& action) {
    require(belongs_here(action), "does not belong to this rank");
    State& state = state_[pairs_.of(action)];
    require(state == State::kDropped, state == State::kAbsent
                                          ? "stands before its forward"
                                          : "makes activations that are there or no longer needed");
    state = State::kKept;
  }

  bool belongs_here(const Action& action) const {
    const Placement& placement = program_.placement;
    if (action.stage < 0 || action.stage >= placement.num_stages()) return false;
    if (placement.rank_of(action.stage) != program_.rank) return false;
    const auto [begin, end] = placement.microbatches_of(action.stage, program_.num_microbatches);
    return action.microbatch >= begin && action.microbatch < end;
  }

  const Programs& programs_;
  const Program& program_;
  PairIndex pairs_;
  std::vector<State> state_;
  size_t here_ = 0;
};

}  // namespace

void check_recompute(const Programs& programs, const Program& program) {
  ActivationWalk(programs, program).check();
}

}  // namespace megacore::pipeline
