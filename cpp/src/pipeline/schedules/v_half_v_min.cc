// V-Half and V-Min: a list scheduler that follows a building block.
//
// A building block gives each rank the slot of its four actions F0 F1 I1 I0 on microbatch 0 (0: the
// stage on the way down, 1: on the way back); microbatch j runs them 6 j slots later, and the two W
// fill the two slots that stay free. Repeated like that, a rank never holds more than `limit`
// activations. The scheduler closes the gaps at the start and the end: slot after slot, every rank
// runs the ready action that comes first in the block, and a W when nothing is ready or when memory
// is full.
//
// Memory stays below the limit and nothing deadlocks, because every wait is for something earlier
// in the block: a rank that is full runs W, and an F may overtake another F of its rank only if,
// counting it, all those it overtakes would still fit at their places in the block.

#include <algorithm>
#include <array>
#include <climits>
#include <vector>

#include "schedules/generate.h"

namespace megacore::pipeline {
namespace {

constexpr int kPeriod = 6;  // slots per microbatch: F, I and W of two stages

// Slots of one rank for microbatch 0, by chunk.
struct BlockSlots {
  std::array<int, 2> forward;
  std::array<int, 2> input;
};

struct BuildingBlock {
  std::vector<BlockSlots> ranks;
  int limit;          // activations a rank may hold
  bool may_overtake;  // whether an F may overtake an F of the other chunk
  bool in_order;      // whether an I waits for the F that come before it in the block
};

class BlockScheduler {
 public:
  BlockScheduler(const PipelineShape& shape, BuildingBlock block)
      : p_(shape.num_ranks),
        m_(shape.num_microbatches),
        block_(std::move(block)),
        ranks_(static_cast<size_t>(p_)),
        forward_end_(2 * static_cast<size_t>(p_) * static_cast<size_t>(m_), INT_MAX),
        input_end_(forward_end_) {
    for (RankState& rank : ranks_) rank.actions.reserve(kPeriod * static_cast<size_t>(m_));
  }

  std::vector<std::vector<Action>> run() && {
    int64_t left = static_cast<int64_t>(kPeriod) * m_ * p_;
    for (int now = 0; left > 0; ++now) {
      for (int rank = 0; rank < p_; ++rank) left -= step(rank, now) ? 1 : 0;
    }
    std::vector<std::vector<Action>> rows;
    for (RankState& rank : ranks_) rows.push_back(std::move(rank.actions));
    return rows;
  }

 private:
  struct RankState {
    std::array<int, 2> num_forwards = {0, 0};
    std::array<int, 2> num_inputs = {0, 0};
    int held = 0;
    std::vector<Action> waiting_weights = {};  // I done, W not yet; the first `num_weights` are
    size_t num_weights = 0;
    std::vector<Action> actions = {};
  };

  // An action that could run now, with its slot in the block.
  struct Candidate {
    int slot = INT_MAX;
    size_t chunk = 0;
    ActionKind kind = ActionKind::kForward;

    bool exists() const { return slot != INT_MAX; }
  };

  int stage_of(int rank, size_t chunk) const { return chunk == 0 ? rank : 2 * p_ - 1 - rank; }
  size_t at(int stage, int microbatch) const {
    return static_cast<size_t>(stage) * static_cast<size_t>(m_) + static_cast<size_t>(microbatch);
  }

  // Runs at most one action in the slot that begins `now`.
  bool step(int rank, int now) {
    RankState& state = ranks_[static_cast<size_t>(rank)];
    const Candidate forward = best_forward(rank, now);
    const Candidate input = best_input(rank, now);
    const bool full = state.held >= block_.limit;
    if (forward.slot < input.slot) {
      if (!full) return run_forward(rank, forward.chunk, now);
      if (run_weight(state)) return true;
    }
    if (input.exists()) return run_input(rank, input.chunk, now);
    return run_weight(state);
  }

  Candidate best_forward(int rank, int now) const {
    const RankState& state = ranks_[static_cast<size_t>(rank)];
    Candidate best;
    for (const size_t chunk : {size_t{0}, size_t{1}}) {
      const int microbatch = state.num_forwards[chunk];
      const int stage = stage_of(rank, chunk);
      if (microbatch == m_ || (stage > 0 && forward_end_[at(stage - 1, microbatch)] > now))
        continue;
      const int slot = slots(rank).forward[chunk] + kPeriod * microbatch;
      if (slot < best.slot && may_run(rank, chunk, slot)) {
        best = {slot, chunk, ActionKind::kForward};
      }
    }
    return best;
  }

  // Whether every forward of the other chunk that comes earlier in the block still fits there.
  bool may_run(int rank, size_t chunk, int slot) const {
    const RankState& state = ranks_[static_cast<size_t>(rank)];
    const size_t other = 1 - chunk;
    int num_forwards = state.num_forwards[0] + state.num_forwards[1] + 1;
    for (int microbatch = state.num_forwards[other]; microbatch < m_; ++microbatch) {
      const int overtaken = slots(rank).forward[other] + kPeriod * microbatch;
      if (overtaken > slot) break;
      if (!block_.may_overtake) return false;
      if (++num_forwards - inputs_before(rank, overtaken) > block_.limit) return false;
    }
    return true;
  }

  // Number of I in the block before `slot`; their W are over by then or can be.
  int inputs_before(int rank, int slot) const {
    int count = 0;
    for (const int first : slots(rank).input) {
      if (slot > first) count += std::min(m_, (slot - first + kPeriod - 1) / kPeriod);
    }
    return count;
  }

  Candidate best_input(int rank, int now) const {
    const RankState& state = ranks_[static_cast<size_t>(rank)];
    Candidate best;
    for (const size_t chunk : {size_t{0}, size_t{1}}) {
      const int microbatch = state.num_inputs[chunk];
      if (microbatch == m_) continue;
      const int stage = stage_of(rank, chunk);
      if (forward_end_[at(stage, microbatch)] > now) continue;
      if (stage < 2 * p_ - 1 && input_end_[at(stage + 1, microbatch)] > now) continue;
      const int slot = slots(rank).input[chunk] + kPeriod * microbatch;
      if (block_.in_order && forward_is_due(rank, slot)) continue;
      if (slot < best.slot) best = {slot, chunk, ActionKind::kBackwardInput};
    }
    return best;
  }

  // Whether an F that comes before `slot` in the block has not run yet.
  bool forward_is_due(int rank, int slot) const {
    const RankState& state = ranks_[static_cast<size_t>(rank)];
    for (const size_t chunk : {size_t{0}, size_t{1}}) {
      const int microbatch = state.num_forwards[chunk];
      if (microbatch < m_ && slots(rank).forward[chunk] + kPeriod * microbatch < slot) return true;
    }
    return false;
  }

  bool run_forward(int rank, size_t chunk, int now) {
    RankState& state = ranks_[static_cast<size_t>(rank)];
    const Action action{stage_of(rank, chunk), ActionKind::kForward, state.num_forwards[chunk]++};
    forward_end_[at(action.stage, action.microbatch)] = now + 1;
    ++state.held;
    state.actions.push_back(action);
    return true;
  }

  bool run_input(int rank, size_t chunk, int now) {
    RankState& state = ranks_[static_cast<size_t>(rank)];
    const Action action{stage_of(rank, chunk), ActionKind::kBackwardInput,
                        state.num_inputs[chunk]++};
    input_end_[at(action.stage, action.microbatch)] = now + 1;
    state.waiting_weights.push_back(action);
    state.actions.push_back(action);
    return true;
  }

  bool run_weight(RankState& state) {
    if (state.num_weights == state.waiting_weights.size()) return false;
    Action action = state.waiting_weights[state.num_weights++];
    action.kind = ActionKind::kBackwardWeight;
    --state.held;
    state.actions.push_back(action);
    return true;
  }

  const BlockSlots& slots(int rank) const { return block_.ranks[static_cast<size_t>(rank)]; }

  int p_;
  int m_;
  BuildingBlock block_;
  std::vector<RankState> ranks_;
  std::vector<int> forward_end_;  // [stage * m + microbatch], INT_MAX until it has run
  std::vector<int> input_end_;
};

// Slots after the paper's appendix: F goes down with one distance per rank and back up with
// another, and so does I; `gap` keeps the four of a rank apart modulo 6.

// With I in order the ranks keep the block's slack in the steady state: a message that takes time
// then delays the schedule once and not once per microbatch.
BuildingBlock v_half_block(int p) {
  const int gap = p % 2 == 0 ? 3 : 0;
  BuildingBlock block{
      .ranks = {}, .limit = 2 * ((p + 2) / 2), .may_overtake = true, .in_order = true};
  for (int r = 0; r < p; ++r) {
    block.ranks.push_back({.forward = {2 * r, 3 * p - 2 - r},
                           .input = {6 * p - 2 + gap - r, 3 * p - 1 + gap + 2 * r}});
  }
  return block;
}

BuildingBlock v_min_block(int p) {
  const int gap = p % 3 == 0 ? 2 : 0;
  // Overtaking helps only where the block itself has a gap; elsewhere it breaks the rhythm.
  BuildingBlock block{
      .ranks = {}, .limit = 2 * ((p + 4) / 3), .may_overtake = gap > 0, .in_order = false};
  for (int r = 0; r < p; ++r) {
    block.ranks.push_back(
        {.forward = {r, 2 * p - 1 - r}, .input = {4 * p + gap - 1 - r, 2 * p + gap + r}});
  }
  return block;
}

Schedule from_block(std::string name, const PipelineShape& shape, BuildingBlock block) {
  const std::vector<std::vector<Action>> rows = BlockScheduler(shape, std::move(block)).run();
  return make_schedule(std::move(name), Placement::v({.num_ranks = shape.num_ranks}),
                       shape.num_microbatches, 3, [&](int rank, std::vector<Action>& actions) {
                         const auto& row = rows[static_cast<size_t>(rank)];
                         actions.insert(actions.end(), row.begin(), row.end());
                       });
}

}  // namespace

Schedule v_half(const PipelineShape& shape) {
  require_v_ranks(shape.num_ranks);
  require_sizes(shape.num_ranks, 2, shape.num_microbatches, 3);
  return from_block("v_half", shape, v_half_block(shape.num_ranks));
}

Schedule v_min(const PipelineShape& shape) {
  require_v_ranks(shape.num_ranks);
  require_sizes(shape.num_ranks, 2, shape.num_microbatches, 3);
  return from_block("v_min", shape, v_min_block(shape.num_ranks));
}

}  // namespace megacore::pipeline
