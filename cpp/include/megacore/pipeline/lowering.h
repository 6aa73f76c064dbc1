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
//
// Where receives stand decides what a transport must be able to do:
//   kAhead    Before the compute action that precedes the reader, so that the transfer runs beside
//             it. Needs one independent queue per channel, as gloo has.
//   kInOrder  All sends and receives of all ranks follow one global order, the times at which the
//             messages are made. Safe on any transport, even if every transfer blocks both its
//             ends: NCCL runs all transfers of a pair of ranks, in both directions, in one queue.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "megacore/pipeline/schedule.h"

namespace megacore::pipeline {

enum class Receives : uint8_t { kAhead, kInOrder };

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
  Receives receives = Receives::kAhead;
  std::vector<ProgramStep> steps;  // in execution order

  friend bool operator==(const Program&, const Program&) = default;
};

// One program per rank. A send directly follows the action that makes its message. Ahead, a receive
// stands where a channel's order asks for it even earlier than described above. O(actions), in
// order O(actions log actions). REQUIRES: validate(schedule) passes.
std::vector<Program> lower(const Schedule& schedule, Receives receives = Receives::kAhead);

// The programs that another lowering made, from the actions of every rank in order. The other ends
// of sends and receives follow from the placement of `schedule`; nothing is acknowledged. The
// result is as the rows say: validate_programs() tells whether it can be executed. Throws
// std::invalid_argument for an action whose stage or microbatch does not exist.
std::vector<Program> programs_from_actions(const Schedule& schedule,
                                           const std::vector<std::vector<Action>>& rows);

// The same program without backward and gradient messages, for evaluation.
// REQUIRES: every rank of the pipeline runs its program like this.
Program forward_only(const Program& program);

// Checks the programs of all ranks together, whatever made them: the compute actions form a valid
// schedule; every value that crosses ranks is sent once, after it was made, and received once,
// before it is read; both ends of a channel list the same messages in the same order;
// `acknowledged` promises nothing too early; with sends and receives that only start, every rank
// reaches its end, and of programs in order also when each of them blocks. Throws
// std::invalid_argument that names rank, position and action and shows the programs as a table.
void validate_programs(std::span<const Program> programs);

// The steps separated by blanks.
std::string to_text(const Program& program);

}  // namespace megacore::pipeline
