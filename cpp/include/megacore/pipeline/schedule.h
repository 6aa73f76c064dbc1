// Pipeline schedules as data.
//
// A schedule says, for every pipeline rank, which compute actions to run and in which order. It is
// made by a pure function (schedules/generators.h), checked by `validate`, timed by `simulate`,
// extended with communication by `lower`, and only then executed. No step of that chain touches a
// tensor.
//
//   to_text(one_f_one_b({.num_ranks = 2, .num_microbatches = 3}))
//     #megacore v1 name=1f1b num_ranks=2 num_stages=2 num_microbatches=3
//     rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
//     rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
//
// A forward and the backward after it can be marked to run at the same time, so that one computes
// while the other communicates; in text such a pair is one cell, (0F4;7B2)OVERLAP_F_B.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "megacore/pipeline/action.h"
#include "megacore/pipeline/placement.h"

namespace megacore::pipeline {

struct Schedule {
  std::string name;  // for people; two schedules with different names can be equal
  Placement placement;
  int num_microbatches = 0;
  bool forward_only = false;     // true: evaluation, no backward action at all
  std::vector<Action> actions;   // compute actions of all ranks, rank after rank
  std::vector<int64_t> offsets;  // [num_ranks + 1]: rank r owns actions [offsets[r], offsets[r+1])
  // Indices of the forwards that run together with the backward right after them, ascending.
  std::vector<int64_t> overlaps = {};

  int num_ranks() const { return placement.num_ranks(); }
  int num_stages() const { return placement.num_stages(); }
  // The actions of one rank in execution order. REQUIRES: 0 <= rank < num_ranks().
  std::span<const Action> rank_actions(int rank) const;

  // The actions of every rank.
  std::vector<std::span<const Action>> rows() const;

  friend bool operator==(const Schedule& a, const Schedule& b) {
    return a.placement == b.placement && a.num_microbatches == b.num_microbatches &&
           a.forward_only == b.forward_only && a.actions == b.actions && a.offsets == b.offsets &&
           a.overlaps == b.overlaps;
  }
};

// All forwards of the schedule and no backward, for evaluation. Their order is not that of
// training, which waits for backwards, but one for the placement and the number of microbatches
// alone: with equal stages in a loop, a V or two chains no order is faster. Between two stages of a
// rank at most about two microbatches per rank wait. No pair overlaps any more. O(steps * stages).
Schedule forward_only(const Schedule& schedule);

// Positions, among the actions of one rank, of the forwards that overlap with what follows them.
std::vector<int64_t> overlap_positions(const Schedule& schedule, int rank);

// Megatron's order list of one rank: +(chunk+1) for a forward, -(chunk+1) for a backward (fused, or
// of the input; backward of weights has no entry). Length 2 * num_chunks * num_microbatches.
std::vector<int32_t> order_list(const Schedule& schedule, int rank);

// A hash of what operator== compares, the same on every machine. O(actions).
uint64_t digest(const Schedule& schedule);

// One header line, then one line per rank.
std::string to_text(const Schedule& schedule);

// Reads to_text's form back. Placement and number of microbatches follow from the actions; the
// result is as the text says and is not validated. Throws std::invalid_argument with the line.
Schedule schedule_from_text(std::string_view text);

// PyTorch's pipelining CSV, compute-only: row i is rank i, comma between cells, CRLF at the end of
// a row. On reading, LF is accepted, blanks around a cell are ignored, an empty cell is idle.
// Throws std::invalid_argument with row and column.
std::string to_csv(const Schedule& schedule);
Schedule schedule_from_csv(std::string_view text, std::string_view name);

}  // namespace megacore::pipeline
