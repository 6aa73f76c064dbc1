// 1F1B-V: a building block on a time grid, moved together without raising the peak.
//
// Every rank runs F0 F1 B1 B0 (0: the stage on the way down, 1: on the way back) on microbatch 0 in
// the slots of the block, a B taking two, and on microbatch j 6 j slots later: the six slots of a
// period are full, so the ranks keep the rhythm forever. Only the start and the end have gaps. In
// order of time every action then moves to the earliest free place behind what it reads; an F only
// as far as the rank holds fewer activations than its peak all the way.

#include <algorithm>
#include <array>
#include <vector>

#include "schedules/generate.h"

namespace megacore::pipeline {
namespace {

constexpr int kSlotsPerMicrobatch = 6;

// The four actions of a rank on one microbatch.
enum BlockPart : int32_t { kF0, kF1, kB1, kB0 };
constexpr int kNumParts = 4;

constexpr bool is_forward(BlockPart part) { return part == kF0 || part == kF1; }
constexpr int length_of(BlockPart part) { return is_forward(part) ? 1 : 2; }

// First slot of each part on microbatch 0.
using PartSlots = std::array<int, kNumParts>;

std::vector<PartSlots> building_block(int p) {
  std::vector<PartSlots> block(static_cast<size_t>(p));
  for (int r = 0; r < p; ++r) {
    block[static_cast<size_t>(r)][kF0] = r;
    block[static_cast<size_t>(r)][kF1] = 2 * p - 1 - r;
  }
  // The backwards go on with two slots per rank, and three more after every third rank: the free
  // slots of the ranks repeat modulo 6 every three ranks.
  int now = 2 * p + (p % 3 == 0 ? 3 : 0);
  int in_a_row = (3 - (p + 2) % 3) % 3;
  const auto next = [&] {
    const int slot = now;
    now += 2;
    if (++in_a_row == 3) {
      in_a_row = 0;
      now += 3;
    }
    return slot;
  };
  for (int r = 0; r < p; ++r) block[static_cast<size_t>(r)][kB1] = next();
  for (int r = p - 1; r >= 0; --r) block[static_cast<size_t>(r)][kB0] = next();
  return block;
}

class Grid {
 public:
  explicit Grid(const PipelineShape& shape)
      : p_(shape.num_ranks),
        m_(shape.num_microbatches),
        limit_(2 * ((2 * p_ + 3) / 3)),
        block_(building_block(p_)),
        num_slots_(kSlotsPerMicrobatch * m_ + block_.front()[kB0] + 2),
        cells_(static_cast<size_t>(p_) * static_cast<size_t>(num_slots_)),
        forward_end_(2 * static_cast<size_t>(p_) * static_cast<size_t>(m_)),
        backward_end_(forward_end_) {
    for (int rank = 0; rank < p_; ++rank) place_block(rank);
  }

  // Moves every action to its final place. An action moves back in time only, so that one pass over
  // the slots meets each of them once.
  void squeeze() {
    for (int slot = 0; slot < num_slots_; ++slot) {
      for (int rank = 0; rank < p_; ++rank) {
        if (cell(rank, slot).holds_start()) move(rank, slot, earliest_slot(rank, slot));
      }
    }
  }

  // The actions of a rank in order of time.
  void append_rank(int rank, std::vector<Action>& actions) const {
    for (int slot = 0; slot < num_slots_; ++slot) {
      const Cell& at = cell(rank, slot);
      if (!at.holds_start()) continue;
      const BlockPart part = at.part();
      const ActionKind kind = is_forward(part) ? ActionKind::kForward : ActionKind::kBackward;
      actions.push_back({stage_of(rank, part), kind, at.microbatch()});
    }
  }

 private:
  static constexpr int32_t kFree = -1;
  static constexpr int32_t kContinued = -2;  // second slot of a backward

  struct Cell {
    int32_t code = kFree;  // or kContinued, or microbatch * kNumParts + part
    int32_t held = 0;      // activations of the rank in this slot

    bool holds_start() const { return code >= 0; }
    BlockPart part() const { return static_cast<BlockPart>(code % kNumParts); }
    int microbatch() const { return code / kNumParts; }
  };

  Cell& cell(int rank, int slot) { return cells_[index_of(rank, slot)]; }
  const Cell& cell(int rank, int slot) const { return cells_[index_of(rank, slot)]; }
  size_t index_of(int rank, int slot) const {
    return static_cast<size_t>(rank) * static_cast<size_t>(num_slots_) + static_cast<size_t>(slot);
  }
  int stage_of(int rank, BlockPart part) const {
    return part == kF0 || part == kB0 ? rank : 2 * p_ - 1 - rank;
  }
  size_t value_of(int stage, int microbatch) const {
    return static_cast<size_t>(stage) * static_cast<size_t>(m_) + static_cast<size_t>(microbatch);
  }

  void place_block(int rank) {
    for (const BlockPart part : {kF0, kF1, kB1, kB0}) {
      for (int microbatch = 0; microbatch < m_; ++microbatch) {
        const int slot = block_[static_cast<size_t>(rank)][static_cast<size_t>(part)] +
                         kSlotsPerMicrobatch * microbatch;
        cell(rank, slot).code = microbatch * kNumParts + part;
        if (!is_forward(part)) cell(rank, slot + 1).code = kContinued;
      }
    }
    int held = 0;
    for (int slot = 0; slot < num_slots_; ++slot) {
      Cell& at = cell(rank, slot);
      if (at.holds_start() && is_forward(at.part())) ++held;
      at.held = held;
      if (at.code == kContinued) --held;  // a backward holds its activation to its end
    }
  }

  // End of everything that an action reads, and of its predecessor of the same kind and stage.
  int inputs_end(int stage, bool forward, int microbatch) const {
    const std::vector<int>& same_kind = forward ? forward_end_ : backward_end_;
    int end = microbatch > 0 ? same_kind[value_of(stage, microbatch - 1)] : 0;
    if (forward) {
      if (stage > 0) end = std::max(end, forward_end_[value_of(stage - 1, microbatch)]);
      return end;
    }
    if (stage < 2 * p_ - 1) end = std::max(end, backward_end_[value_of(stage + 1, microbatch)]);
    return std::max(end, forward_end_[value_of(stage, microbatch)]);
  }

  int earliest_slot(int rank, int slot) const {
    const BlockPart part = cell(rank, slot).part();
    const bool forward = is_forward(part);
    int earliest = inputs_end(stage_of(rank, part), forward, cell(rank, slot).microbatch());
    if (forward) {
      int lowest = slot;
      while (lowest > earliest && cell(rank, lowest - 1).held < limit_) --lowest;
      earliest = lowest;
      while (earliest < slot && cell(rank, earliest).code != kFree) ++earliest;
      return earliest;
    }
    // The slots that the action has now count as free.
    const auto is_free = [&](int s) { return s >= slot || cell(rank, s).code == kFree; };
    while (earliest < slot && !(is_free(earliest) && is_free(earliest + 1))) ++earliest;
    return earliest;
  }

  void move(int rank, int from, int to) {
    const int32_t code = cell(rank, from).code;
    const BlockPart part = cell(rank, from).part();
    const int microbatch = cell(rank, from).microbatch();
    const int length = length_of(part);
    for (int i = 0; i < length; ++i) cell(rank, from + i).code = kFree;
    cell(rank, to).code = code;
    if (length == 2) cell(rank, to + 1).code = kContinued;
    const int shift = is_forward(part) ? 0 : length;
    for (int slot = to + shift; slot < from + shift && slot < num_slots_; ++slot) {
      cell(rank, slot).held += is_forward(part) ? 1 : -1;
    }
    (is_forward(part) ? forward_end_ : backward_end_)[value_of(stage_of(rank, part), microbatch)] =
        to + length;
  }

  int p_;
  int m_;
  int limit_;
  std::vector<PartSlots> block_;
  int num_slots_;
  std::vector<Cell> cells_;       // [rank * num_slots + slot]
  std::vector<int> forward_end_;  // [stage * m + microbatch], of the actions moved so far
  std::vector<int> backward_end_;
};

}  // namespace

Schedule one_f_one_b_v(const PipelineShape& shape) {
  require_v_ranks(shape.num_ranks);
  require_sizes(shape.num_ranks, 2, shape.num_microbatches, 3);
  Grid grid(shape);
  grid.squeeze();
  return make_schedule(
      "1f1b_v", Placement::v({.num_ranks = shape.num_ranks}), shape.num_microbatches, 2,
      [&](int rank, std::vector<Action>& actions) { grid.append_rank(rank, actions); });
}

}  // namespace megacore::pipeline
