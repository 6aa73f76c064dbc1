// The named schedules: pure functions from a few sizes to a Schedule.
//
// F, B are the times of one forward and one fused backward of a stage, p ranks, m microbatches, v
// model chunks per rank, r a rank. "Bubble" is what the makespan holds beyond the work of one rank.
// Every generator throws std::invalid_argument for sizes that cannot work, naming legal ones.

#pragma once

#include <optional>

#include "megacore/pipeline/schedule.h"

namespace megacore::pipeline {

struct PipelineShape {
  int num_ranks;         // p >= 1, one stage each
  int num_microbatches;  // m >= 1, per rank and optimizer step
};

// F-then-B: all forwards, then all backwards in the same microbatch order.
// Bubble (p-1)(F+B); m microbatches in flight on every rank.
// Source: Huang et al., GPipe, arXiv:1811.06965.
Schedule gpipe(const PipelineShape& shape);

// One-forward-one-backward. Rank r runs min(p-r-1, m) warmup forwards, then alternates F and B,
// then drains. Bubble (p-1)(F+B); min(p-r, m) microbatches in flight on rank r.
// Source: Narayanan et al., arXiv:2104.04473, section 2.2.1.
Schedule one_f_one_b(const PipelineShape& shape);

struct InterleavedShape {
  int num_ranks;         // p >= 1
  int num_chunks;        // v >= 1 model chunks per rank; with 1 the schedule is 1F1B
  int num_microbatches;  // m >= 1
  // Microbatches that one chunk runs before the next chunk takes over; nullopt: best_group_size().
  std::optional<int> group_size = std::nullopt;
};

// Interleaved 1F1B over v model chunks per rank, stage = chunk * p + rank, with the order of
// schedule_table.h. Rank r runs interleaved_warmup() forwards, then alternates F and B, then
// drains. With the times of one stage (a chunk): bubble (p-1)(F+B) when the group size is a best
// one; min(2(p-r-1) + (v-1) group_size + 1, v m) chunks in flight on rank r.
//
// A group smaller than p, or a last group smaller than p, makes some sizes deadlock: those are
// refused with the nearest legal group sizes and numbers of microbatches. All that can run is
// accepted, also a group larger than m.
// Source: Narayanan et al., arXiv:2104.04473, section 2.2.2.
Schedule interleaved_one_f_one_b(const InterleavedShape& shape);

// Warmup forwards of rank r: min(2(p-r-1) + (v-1) group_size, v m) for v > 1, min(p-r-1, m) for 1.
// REQUIRES: shape.group_size is set, 0 <= rank < num_ranks.
int interleaved_warmup(const InterleavedShape& shape, int rank);

// The smallest group size whose interleaved schedule reaches the smallest makespan that any group
// size reaches (uniform stages, B = 2F, free sends). Smaller groups hold fewer chunks in flight.
// shape.group_size is ignored. O(m) when m >= p.
int best_group_size(const InterleavedShape& shape);

}  // namespace megacore::pipeline
