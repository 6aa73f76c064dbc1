// Can the programs of all ranks be executed together?
//
// A transport is modelled by its queues. A send or receive is posted into a queue of its rank and
// waits there until it is at the head; a transfer happens when both its ends are (a rendezvous).
// Compute actions wait for the receives they read; nothing else waits.

#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "megacore/pipeline/program/lowering.h"

namespace megacore::pipeline {

// Which transfers of a rank share a queue, from the most independent to the least.
enum class Transport : uint8_t {
  kPerChannel,    // one queue per ordered pair of ranks: gloo, communicators per edge
  kPerPair,       // one per unordered pair: NCCL with a communicator of two ranks
  kPerDirection,  // one for activations and one for gradients: a communicator for each
  kPerRank,       // one: all transfers on one communicator
};

// Text of each transport, indexed by its value.
inline constexpr std::array<std::string_view, 4> kTransportText = {
    "per_channel", "per_pair", "per_direction", "per_rank"};

// Checks the programs of all ranks together, whatever made them:
//   - the compute actions form a valid schedule;
//   - every value that crosses ranks is sent once, after it was made, and received once, before it
//     is read; both ends of a channel list the same messages in the same order, with their numbers;
//   - `acknowledged` promises nothing too early;
//   - every rank reaches its end with each of the given transports;
//   - of the passes a program has been through, nothing is missing, repeated or out of place: no
//     buffer slot is taken while it is in use, no activation released or dropped before its last
//     reader, parameters collected before the first forward and gradients reduced after the last
//     backward of a stage, batches made of neighbours.
// Throws std::invalid_argument that names rank, position and action and shows the programs as a
// table. O(steps) per transport.
void validate_programs(std::span<const Program> programs, std::span<const Transport> transports);

// With the one transport that decides: a queue per channel if receives are ahead, one per rank if
// they are in order. What runs with fewer queues runs with more.
void validate_programs(std::span<const Program> programs);

// By transport, in the order of Transport: why the programs cannot be executed with it, or nothing.
// Throws like validate_programs() for programs that no transport can execute.
std::vector<std::string> transport_report(std::span<const Program> programs);

}  // namespace megacore::pipeline
