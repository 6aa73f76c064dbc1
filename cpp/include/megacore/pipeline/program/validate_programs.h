// Can the programs of all ranks be executed together?
//
// A send or receive is posted into a queue of its rank and waits there until it is at the head; a
// transfer happens when both its ends are (a rendezvous). Compute actions wait for the receives
// they read; nothing else waits. Programs with receives ahead have one queue per ordered pair of
// ranks, as gloo has; those with receives in order have one per rank, as if all transfers of a rank
// were on one communicator. What runs with fewer queues runs with more.

#pragma once

#include <functional>
#include <span>

#include "megacore/pipeline/program/lowering.h"

namespace megacore::pipeline {

// Checks the programs of all ranks together, whatever made them:
//   - the compute actions form a valid schedule;
//   - every value that crosses ranks is sent once, after it was made, and received once, before it
//     is read; both ends of a channel list the same messages in the same order;
//   - `acknowledged` promises nothing too early;
//   - what a forward dropped is recomputed once, before its backward;
//   - every rank reaches its end.
// Throws std::invalid_argument that names rank, position and action and shows the programs as a
// table. O(steps).
void validate_programs(std::span<const Program> programs);

// Gives the program of a rank; valid until the next call.
using ProgramOf = std::function<const Program&(int rank)>;

// The same checks of the programs that were made of a schedule, each asked for once, in rank order,
// so that no two need to exist at a time: the compute actions must be those of the schedule. Keeps
// some bytes per step.
// REQUIRES: validate(schedule) passes; `program_of` gives equal programs each time it is asked.
void validate_programs(const Schedule& schedule, Receives receives, const ProgramOf& program_of);

}  // namespace megacore::pipeline
