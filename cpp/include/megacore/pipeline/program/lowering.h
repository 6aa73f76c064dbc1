// From a schedule to what each rank executes: compute actions plus sends and receives.
//
//   const std::vector<Program> programs = lower(one_f_one_b({.num_ranks = 2,
//                                                            .num_microbatches = 2}));
//   to_text(programs[1]);  // "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
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
//   kAhead    Before the compute action that precedes the reader (`ahead` of them, if more than 1),
//             so that the transfer runs beside it. Needs one independent queue per channel, as gloo
//             has. A receive never stands behind a later message of its channel.
//   kInOrder  All sends and receives of all ranks follow one global order, the times at which the
//             messages are made. Safe on any transport, even if every transfer blocks both its
//             ends: NCCL runs all transfers of a pair of ranks, in both directions, in one queue.
//
// Two actions that overlap stay together: the receives of both stand before them, the sends of both
// behind them.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "megacore/pipeline/schedule.h"
#include "megacore/pipeline/simulate.h"

namespace megacore::pipeline {

enum class Receives : uint8_t { kAhead, kInOrder };

struct ProgramStep {
  Action action;
  int32_t peer = -1;  // rank at the other end of a send or receive; -1 for a compute action
  // Of a receive: once its message has arrived, the first `acknowledged` sends of this rank to
  // `peer` have been received for sure, so waiting for them returns at once and their buffers can
  // go.
  int32_t acknowledged = 0;
  bool starts_pair = false;        // runs together with the compute action that follows
  bool drops_activations = false;  // a forward whose activations a RECOMPUTE makes again

  friend bool operator==(const ProgramStep&, const ProgramStep&) = default;
};

struct Program {
  int rank = 0;
  Placement placement;
  int num_microbatches = 0;
  bool forward_only = false;
  Receives receives = Receives::kAhead;
  std::vector<ProgramStep> steps;  // in execution order
  int ahead = 1;                   // of Receives::kAhead

  friend bool operator==(const Program&, const Program&) = default;
};

// Makes the program of one rank without those of the others. A send directly follows the action
// that makes its message. Ahead, a receive stands where a channel's order asks for it even earlier
// than described above; `ahead` 0 places it directly before its reader where that order permits.
class Lowering {
 public:
  // O(actions). Throws std::invalid_argument for a negative `ahead`.
  // REQUIRES: validate(schedule) passes; the schedule outlives this.
  explicit Lowering(const Schedule& schedule, Receives receives = Receives::kAhead, int ahead = 1);

  // O(actions of the rank and of those it exchanges messages with).
  Program program(int rank) const;

 private:
  const Schedule* schedule_;
  Receives receives_;
  int ahead_;
  std::vector<int32_t> indices_;  // by value: index of its action in its rank
  Timeline timeline_ = {};        // of receives in order
};

// The programs of all ranks. O(actions).
std::vector<Program> lower(const Schedule& schedule,
                           Receives receives = Receives::kAhead,
                           int ahead = 1);

// The programs that another lowering made, from the actions of every rank in order. The other ends
// of sends and receives follow from the placement of `schedule`; nothing is acknowledged. The
// result is as the rows say: validate_programs() tells whether it can be executed. Throws
// std::invalid_argument for an action whose stage or microbatch does not exist.
std::vector<Program> programs_from_actions(const Schedule& schedule,
                                           const std::vector<std::vector<Action>>& rows);

// The program of its rank for forward_only(schedule), with the same placement of receives.
// REQUIRES: every rank of the pipeline runs its program like this.
Program forward_only(const Program& program);

// The actions separated by blanks.
std::string to_text(const Program& program);

}  // namespace megacore::pipeline
