// The named schedules: pure functions from a few sizes to a Schedule.
//
// F, B are the times of one forward and one fused backward of a stage; I and W the two halves of a
// split backward (gradient of the input, gradient of the weights); p ranks, m microbatches, v model
// chunks per rank, r a rank. "Bubble" is what the makespan holds beyond the work of one rank, with
// messages that take no time. "In flight" counts (stage, microbatch) pairs from F until B or W.
// Every generator throws std::invalid_argument for sizes that cannot work, naming legal ones.
// schedule_catalog.h lists them all by name.

#pragma once

#include <optional>

#include "megacore/pipeline/schedule.h"

namespace megacore::pipeline {

struct PipelineShape {
  int num_ranks;         // p >= 1
  int num_microbatches;  // m >= 1, per rank and optimizer step
};

struct ChunkedShape {
  int num_ranks;         // p >= 1
  int num_chunks;        // v >= 1 model chunks per rank
  int num_microbatches;  // m >= 1
};

// ---- one stage per rank ------------------------------------------------------------------------

// One rank, num_chunks stages: a microbatch goes through all of them and back before the next one.
Schedule no_pipelining(const ChunkedShape& shape);  // REQUIRES: num_ranks is 1

// F-then-B: all forwards, then all backwards in the same microbatch order.
// Bubble (p-1)(F+B); m microbatches in flight on every rank.
// Source: Huang et al., GPipe, arXiv:1811.06965.
Schedule gpipe(const PipelineShape& shape);

// Whether the forwards behind the warmup of 1F1B and interleaved 1F1B run together with the
// backwards that follow them (Schedule::overlaps), which are then those of older microbatches. For
// that every rank runs one more warmup forward, and at least two more than the rank behind it:
// values travel in both directions at the end of a pair.
enum class Pairs : uint8_t {
  kNone,
  kWhole,  // (F;B)
  kSplit,  // (F;I), then W of the same backward: messages leave before W
};

// One-forward-one-backward. Rank r runs min(p-r-1, m) warmup forwards, then alternates F and B,
// then drains. Bubble (p-1)(F+B); min(p-r, m) microbatches in flight on rank r.
// With pairs min(2(p-r)-1, m) warmup forwards; min(2(p-r), m) in flight.
// Source: Narayanan et al., arXiv:2104.04473, section 2.2.1.
Schedule one_f_one_b(const PipelineShape& shape, Pairs pairs = Pairs::kNone);

// 1F1B with a split backward; rank r runs W r backwards late, and what is left of it at the end.
// Bubble (p-1)(F+I-W) for F = I = W and m >= p; min(p, m) in flight on every rank.
// Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.3.1.
Schedule zb_h1(const PipelineShape& shape);

// Rank r runs 2(p-r)-1 warmup forwards and W 2r backwards late: from its first to its last action
// no rank waits when F = I = W and m >= 2p-1. Bubble (p-1)F for m >= p; min(2p-1, m) in flight.
// Source: Qi et al., arXiv:2401.10241, section 2.3.2.
Schedule zb_h2(const PipelineShape& shape);

// ---- several stages per rank, stage = chunk * p + rank -----------------------------------------

struct InterleavedShape {
  int num_ranks;         // p >= 1
  int num_chunks;        // v >= 1 model chunks per rank; with 1 the schedule is 1F1B
  int num_microbatches;  // m >= 1
  // Microbatches that one chunk runs before the next chunk takes over; nullopt: best_group_size().
  std::optional<int> group_size = std::nullopt;
  // Warmup forwards more per rank that follows, 1 or 2. With 2 a message has the time of an action
  // to travel unnoticed; with 1 rank r holds p-r-1 fewer chunks in flight. The makespan with free
  // messages is the same.
  int warmup_multiplier = 2;
  Pairs pairs = Pairs::kNone;  // as with one_f_one_b
};

// Interleaved 1F1B over v model chunks per rank, with the order of schedule_table.h. Rank r runs
// interleaved_warmup() forwards, then alternates F and B, then drains. With the times of one stage
// (a chunk): bubble (p-1)(F+B) when the group size is a best one; with multiplier k
// min(k(p-r-1) + (v-1) group_size + 1, v m) chunks in flight on rank r.
//
// A group smaller than p, or a last group smaller than p, makes some sizes deadlock: those are
// refused with the nearest legal group sizes and numbers of microbatches. All that can run is
// accepted, also a group larger than m.
//
// With pairs there is one chunk more in flight (k = 2, also for v = 1). When a pair takes h less
// than its two halves, the bubble is (p-1)(F+B) - h (v m - (v-1) group_size - 1) with whole
// backwards; with split ones (p-1)(F+I) for h = 0, and that minus h (m - 1) for v = 1.
// Source: Narayanan et al., arXiv:2104.04473, section 2.2.2.
Schedule interleaved_one_f_one_b(const InterleavedShape& shape);

// Warmup forwards of rank r: min(k(p-r-1) + (v-1) group_size, v m) with multiplier k, which is 1
// for v = 1. With pairs one more, and k stays as given for v = 1. Throws std::invalid_argument for
// a rank or a size out of range, but not for sizes that deadlock.
int interleaved_warmup(const InterleavedShape& shape, int rank);

// The smallest group size whose interleaved schedule reaches the smallest makespan that any group
// size reaches (uniform stages, B = 2F, free sends). Smaller groups hold fewer chunks in flight.
// shape.group_size is ignored. O(m) when m >= p.
int best_group_size(const InterleavedShape& shape);

struct GroupedShape {
  int num_ranks;         // p >= 1
  int num_chunks;        // v >= 1
  int num_microbatches;  // m >= 1
  std::optional<int> group_size = std::nullopt;
};

// Interleaved order with a split backward whose W follows its I at once, so that the gradient
// leaves as early as it can, and groups that may be as small as p/2: fewer chunks in flight for a
// larger bubble. With group size g, p/2 <= g <= p, that divides m:
// bubble (p-1)(F+I) + (v-1)(p-g)F for F = I = W; (v-1)g + p-r chunks in flight on rank r.
// Without a group size: the smallest of at least p/2 that runs. REQUIRES: ceil(p/2) <= g.
// Source: Wan et al., PipeOffload, arXiv:2503.01328, section 3.3.
Schedule group_interleaved(const GroupedShape& shape);

// Interleaved order with a split backward; rank r runs W r backwards late. Bubble (p-1)(F+I-W) for
// F = I = W and a best group size (the default); min(p v, m v) chunks in flight for group size p.
// With one chunk it is zb_h1. Source: Qi et al., arXiv:2401.10241; order of torch 2.13.
Schedule interleaved_zero_bubble(const GroupedShape& shape);

// Breadth first: all microbatches forward through the first chunk, then the next one, and so on;
// then backward from the last chunk, the newest microbatch first.
// Bubble (p-1)(F+B) for m >= p; v m chunks in flight.
// Source: Lamy-Poirier, arXiv:2211.05953; order of torch 2.13.
Schedule looped_bfs(const ChunkedShape& shape);

// ---- two stages per rank in V placement: rank r holds stages r and 2p-1-r ----------------------

// Bubble (p-1)F for F = I = W and m >= 2p-1; from its first to its last action no rank waits.
// min(2p, 2m) chunks in flight: as much as 1F1B. Fewer microbatches run the same order with the
// missing ones left out.
// Source: Qi et al., arXiv:2401.10241, section 6; order of torch 2.13.
Schedule zb_v(const PipelineShape& shape);

// Half the memory of 1F1B: 2 floor((p+2)/2) chunks in flight at most. Makespan with F = I = W = 1
// and m >= p: 6m + 3p - 7 for even p >= 4, 6m + 3p - 4 for odd p >= 3, 6m + 1 for p = 2.
// Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv:2405.15362.
Schedule v_half(const PipelineShape& shape);

// A third of the memory of 1F1B: 2 floor((p+4)/3) chunks in flight at most. Makespan with
// F = I = W = 1 and m >= p: 6m + 4p - 5, and 2 less when 3 divides p.
// Source: Qi et al., arXiv:2405.15362.
Schedule v_min(const PipelineShape& shape);

// Fused backward in V placement with two thirds of the memory of 1F1B: 2 floor((2p+3)/3) chunks in
// flight at most. Makespan with F = 1, B = 2 and m >= p > 2: 6m + 5p - 5 when p leaves 1 over 3, at
// most 6m + 5p - 7 else. Source: Qi et al., arXiv:2405.15362.
Schedule one_f_one_b_v(const PipelineShape& shape);

// Forwards run together with backwards of the other stage of the rank (Schedule::overlaps), so that
// one computes while the other communicates. Bubble (p-1)(F+B + B-3W) when a pair takes F+B;
// 2p+1 chunks in flight at most. REQUIRES: m >= 2p.
// Source: DeepSeek-AI, DualPipe, github.com/deepseek-ai/DualPipe; order of torch 2.13.
Schedule dualpipe_v(const PipelineShape& shape);

// ---- two chains in opposite directions: rank r holds stage r of one, p-1-r of the other --------

// The first half of the microbatches enters at rank 0, the second half at rank p-1; pairs overlap
// as in dualpipe_v. Every rank holds two stages, so parameters are held twice.
// Bubble (p/2-1)(F+B + B-3W) when a pair takes F+B; p+1 stages in flight at most.
// REQUIRES: p and m are even, m >= 2p.
// Source: DeepSeek-AI, arXiv:2412.19437, section 3.2.1; github.com/deepseek-ai/DualPipe.
Schedule dualpipe(const PipelineShape& shape);

}  // namespace megacore::pipeline
