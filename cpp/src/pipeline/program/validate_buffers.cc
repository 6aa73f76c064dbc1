#include <algorithm>
#include <limits>

#include "megacore/base/check.h"
#include "program/lifetimes.h"
#include "program/messages.h"
#include "program/program_errors.h"

namespace megacore::pipeline {
namespace {

using base::concat;

// Walks one rank's program and follows every buffer from its first to its last use.
class RankBuffers {
 public:
  RankBuffers(Programs programs, int rank)
      : programs_(programs),
        program_(programs[static_cast<size_t>(rank)]),
        pairs_(program_),
        stage_of_chunk_(program_.placement.stages_of(rank)),
        activations_(pairs_.size()),
        inputs_(pairs_.size()),
        gradients_(pairs_.size()),
        stages_(stage_of_chunk_.size()) {}

  void check() {
    has_releases_ = program_.passes.releases || has(ActionKind::kRelease);
    has_sync_ = program_.passes.parameter_sync || has(ActionKind::kGatherParams) ||
                has(ActionKind::kReduceGrads);
    for (here_ = 0; here_ < program_.steps.size(); ++here_) {
      const ProgramStep& step = program_.steps[here_];
      check_batch(step);
      if (is_per_stage(step.action.kind)) {
        move_parameters(step.action);
      } else if (step.action.kind == ActionKind::kRelease ||
                 step.action.kind == ActionKind::kRecompute) {
        check_pair(step.action);
        step.action.kind == ActionKind::kRelease ? release(step) : recompute(step);
      } else if (is_compute(step.action.kind)) {
        compute(step);
      } else if (is_recv(step.action.kind) && program_.passes.slots) {
        take(step, step.action.kind == ActionKind::kRecvForward ? inputs_ : gradients_);
      }
    }
    check_end();
  }

 private:
  enum class State : uint8_t { kAbsent, kKept, kDropped, kRead, kReleased };

  // The buffers of one kind, by pair, and who holds which slot of which pool.
  struct Kind {
    explicit Kind(size_t num_pairs) : state(num_pairs, State::kAbsent), slot(num_pairs, -1) {}

    std::vector<State> state;
    std::vector<int32_t> slot;
    std::vector<std::vector<int64_t>> holders;  // by pool and slot: index of a step, or -1
  };

  struct StageUse {
    bool gathered = false;
    bool reduced = false;
    bool used = false;
  };

  bool has(ActionKind kind) const {
    return std::any_of(program_.steps.begin(), program_.steps.end(), [&](const ProgramStep& step) {
      return step.action.kind == kind;
    });
  }

  void require(bool holds, std::string_view text) const {
    if (!holds) refuse_here(std::string(text));
  }
  [[noreturn]] void refuse_here(std::string text) const {
    refuse_step(programs_, program_.rank, static_cast<int64_t>(here_), std::move(text));
  }

  // Stage and microbatch belong to this rank.
  void check_pair(const Action& action) const {
    const auto& [stage, kind, microbatch] = action;
    bool holds = stage >= 0 && stage < program_.placement.num_stages() &&
                 program_.placement.rank_of(stage) == program_.rank;
    if (holds && !is_per_stage(kind)) {
      const MicrobatchRange range =
          program_.placement.microbatches_of(stage, program_.num_microbatches);
      holds = microbatch >= range.begin && microbatch < range.end;
    }
    require(holds, "does not belong to this rank");
  }

  // ---- activations
  // -------------------------------------------------------------------------------

  void compute(const ProgramStep& step) {
    const Action& action = step.action;
    const size_t pair = pairs_.of(action);
    State& state = activations_.state[pair];
    StageUse& stage = stages_[chunk_of(action)];
    if (action.kind == ActionKind::kForward) {
      require(!has_sync_ || stage.gathered, "stands before the GATHER_PARAMS of its stage");
      stage.used = true;
      require(!step.drops_activations || !program_.forward_only,
              "drops activations in a program without backward");
      if (program_.passes.slots) take(step, activations_);
      state = step.drops_activations ? State::kDropped : State::kKept;
      free(inputs_, pair, action.stage);
    } else {
      require(!stage.reduced, "stands behind the REDUCE_GRADS of its stage");
      require(state != State::kReleased, "reads activations that have been released");
      require(state != State::kDropped,
              "reads activations that its forward dropped, and no RECOMPUTE stands before it");
      check_slot(step, activations_);
      if (frees_activation(action.kind)) free(gradients_, pair, action.stage);
    }
    if (!reads_activation_last(action, program_.forward_only)) return;
    state = State::kRead;
    if (!program_.passes.releases) free(activations_, pair, action.stage);
  }

  void recompute(const ProgramStep& step) {
    State& state = activations_.state[pairs_.of(step.action)];
    require(state == State::kDropped,
            state == State::kAbsent ? "stands before its forward"
                                    : "makes activations that are there or no longer needed");
    check_slot(step, activations_);
    state = State::kKept;
  }

  void release(const ProgramStep& step) {
    const size_t pair = pairs_.of(step.action);
    State& state = activations_.state[pair];
    require(state != State::kReleased, "is repeated");
    require(state == State::kRead, "stands before the last action that reads the activations");
    check_slot(step, activations_);
    state = State::kReleased;
    free(activations_, pair, step.action.stage);
  }

  // ---- slots
  // -------------------------------------------------------------------------------------

  int64_t& holder(Kind& kind, int stage, int32_t slot) {
    const size_t pool = pool_of(program_, stage, *program_.passes.slots);
    if (kind.holders.size() <= pool) kind.holders.resize(pool + 1);
    auto& slots = kind.holders[pool];
    if (slots.size() <= static_cast<size_t>(slot)) slots.resize(static_cast<size_t>(slot) + 1, -1);
    return slots[static_cast<size_t>(slot)];
  }

  void take(const ProgramStep& step, Kind& kind) {
    // More slots than steps cannot be in use; do not allocate for them.
    require(step.slot >= 0 && static_cast<size_t>(step.slot) < program_.steps.size(),
            "has no buffer slot");
    int64_t& owner = holder(kind, step.action.stage, step.slot);
    if (owner >= 0) {
      refuse_here(concat("takes slot ",
                         step.slot,
                         ", which ",
                         to_text(program_.steps[static_cast<size_t>(owner)].action),
                         " has taken and which is still in use"));
    }
    owner = static_cast<int64_t>(here_);
    kind.slot[pairs_.of(step.action)] = step.slot;
  }

  void check_slot(const ProgramStep& step, const Kind& kind) const {
    if (!program_.passes.slots) return;
    const int32_t held = kind.slot[pairs_.of(step.action)];
    if (step.slot == held) return;
    refuse_here(concat("names slot ", step.slot, ", but its activations are in slot ", held));
  }

  void free(Kind& kind, size_t pair, int stage) {
    if (kind.slot[pair] < 0) return;
    holder(kind, stage, kind.slot[pair]) = -1;
    kind.slot[pair] = -1;
  }

  // ---- parameters and batches
  // --------------------------------------------------------------------

  size_t chunk_of(const Action& action) const {
    return static_cast<size_t>(program_.placement.chunk_of(action.stage));
  }

  void move_parameters(const Action& action) {
    check_pair(action);
    StageUse& stage = stages_[chunk_of(action)];
    if (action.kind == ActionKind::kGatherParams) {
      require(!stage.gathered, "is repeated");
      require(!stage.used, "stands behind the first forward of its stage");
      stage.gathered = true;
      return;
    }
    require(!program_.forward_only, "stands in a program without backward");
    require(!stage.reduced, "is repeated");
    require(is_last_use(action.stage), "stands before the last backward of its stage");
    stage.reduced = true;
  }

  // True when no compute action of the stage follows.
  bool is_last_use(int stage) const {
    return std::none_of(program_.steps.begin() + static_cast<std::ptrdiff_t>(here_),
                        program_.steps.end(),
                        [&](const ProgramStep& step) {
                          return is_compute(step.action.kind) && step.action.stage == stage;
                        });
  }

  // A batch is a run of transfers, and batches are numbered as they come.
  void check_batch(const ProgramStep& step) {
    if (step.batch < 0) {
      open_batch_ = -1;
      return;
    }
    require(is_transfer(step.action.kind), "is in a batch, but is no transfer");
    require(program_.receives == Receives::kInOrder,
            "is in a batch, which needs receives in order");
    if (step.batch != open_batch_) {
      require(step.batch == num_batches_, "is in a batch that is not in one piece");
      open_batch_ = num_batches_++;
    }
  }

  void check_end() const {
    const auto missing = [&](const Action& action) {
      refuse(programs_,
             {{program_.rank, static_cast<int64_t>(program_.steps.size())}},
             concat("rank ", program_.rank, ": ", to_text(action), " is missing"));
    };
    for (size_t chunk = 0; chunk < stages_.size(); ++chunk) {
      const int stage = stage_of_chunk_[chunk];
      if (has_sync_ && !stages_[chunk].gathered) {
        missing({stage, ActionKind::kGatherParams, kNoMicrobatch});
      }
      if (has_sync_ && !program_.forward_only && !stages_[chunk].reduced) {
        missing({stage, ActionKind::kReduceGrads, kNoMicrobatch});
      }
      const MicrobatchRange range =
          program_.placement.microbatches_of(stage, program_.num_microbatches);
      for (int microbatch = range.begin; has_releases_ && microbatch < range.end; ++microbatch) {
        const Action action{stage, ActionKind::kRelease, microbatch};
        if (activations_.state[pairs_.of(action)] != State::kReleased) missing(action);
      }
    }
  }

  Programs programs_;
  const Program& program_;
  PairIndex pairs_;
  std::span<const int32_t> stage_of_chunk_;
  Kind activations_;
  Kind inputs_;
  Kind gradients_;
  std::vector<StageUse> stages_;  // by chunk
  bool has_releases_ = false;
  bool has_sync_ = false;
  size_t here_ = 0;
  int32_t open_batch_ = -1;
  int32_t num_batches_ = 0;
};

}  // namespace

void check_buffers(Programs programs) {
  for (size_t rank = 0; rank < programs.size(); ++rank) {
    RankBuffers(programs, static_cast<int>(rank)).check();
  }
}

}  // namespace megacore::pipeline
