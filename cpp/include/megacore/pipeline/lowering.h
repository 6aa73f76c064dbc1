// From a schedule to what each rank executes: compute actions plus sends and receives.
//
//   const std::vector<Program> programs = lower(one_f_one_b({.num_ranks = 2,
//                                                            .num_microbatches = 2}));
//   to_text(programs[1]);  // "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
//
// How to execute a program without blocking: a send or receive only starts the transfer; a compute
// action first waits for the receives it reads; nothing else waits, except as `acknowledged`
// allows.
//
// A channel is an ordered pair of ranks. Messages of one channel are received in the order in which
// they are sent, so the transport may be a FIFO without tags. A pair of neighbouring stages on one
// rank needs no message.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "megacore/pipeline/schedule.h"

namespace megacore::pipeline {

struct ProgramStep {
  Action action;
  int32_t peer = -1;  // rank at the other end of a send or receive; -1 for a compute action
  // Of a receive: once its message has arrived, the first `acknowledged` sends of this rank to
  // `peer` have been received for sure, so waiting for them returns at once and their buffers can
  // go.
  int32_t acknowledged = 0;

  friend bool operator==(const ProgramStep&, const ProgramStep&) = default;
};

struct Program {
  int rank = 0;
  Placement placement;
  int num_microbatches = 0;
  bool forward_only = false;
  std::vector<ProgramStep> steps;  // in execution order

  friend bool operator==(const Program&, const Program&) = default;
};

// One program per rank. A send directly follows the action that makes its message. A receive stands
// before the compute action that precedes its reader, so that it is posted while that one runs;
// where a channel's order asks for it, earlier. O(actions). REQUIRES: validate(schedule) passes.
std::vector<Program> lower(const Schedule& schedule);

// The same program without backward and gradient messages, for evaluation.
// REQUIRES: every rank of the pipeline runs its program like this.
Program forward_only(const Program& program);

// Checks the programs of all ranks together, whatever made them: the compute actions form a valid
// schedule; every value that crosses ranks is sent once, after it was made, and received once,
// before it is read; both ends of a channel list the same messages in the same order;
// `acknowledged` promises nothing too early; and with sends and receives that only start, every
// rank reaches its end. Throws std::invalid_argument that names rank, position and action and shows
// the programs as a table.
void validate_programs(std::span<const Program> programs);

// The steps separated by blanks.
std::string to_text(const Program& program);

}  // namespace megacore::pipeline
