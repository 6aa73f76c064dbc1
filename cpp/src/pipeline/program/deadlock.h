// Do the programs of all ranks reach their ends? Private.

#pragma once

#include <cstdint>
#include <vector>

#include "dependencies.h"
#include "megacore/pipeline/schedule.h"
#include "program/program_errors.h"

namespace megacore::pipeline {

// What can stop a program: its sends and receives, and the compute actions that wait for a receive.
// A message is its value: that of the action that reads it (ValueIndex).
class Events {
 public:
  enum class Kind : uint8_t { kSend, kReceive, kWait };

  // Room for all events; memory that is not used is not touched.
  explicit Events(size_t num_messages) { events_.reserve(3 * num_messages); }

  void add(Kind kind, size_t message) {
    events_.push_back(static_cast<uint32_t>(message << 2 | static_cast<uint32_t>(kind)));
  }
  // Ends the events of a rank, and begins those of the next.
  void end_rank() { begin_.push_back(events_.size()); }

  Kind kind(size_t event) const { return static_cast<Kind>(events_[event] & 3); }
  size_t message(size_t event) const { return events_[event] >> 2; }
  size_t begin(int32_t rank) const { return begin_[static_cast<size_t>(rank)]; }
  size_t end(int32_t rank) const { return begin_[static_cast<size_t>(rank) + 1]; }

  static constexpr size_t kMaxMessages = size_t{1} << 30;

 private:
  std::vector<uint32_t> events_;     // of all ranks, rank after rank, in program order
  std::vector<size_t> begin_ = {0};  // [num_ranks + 1]
};

// Throws unless every rank reaches its end with one queue per channel if receives are ahead, and
// with one queue per rank if they are in order. number[m]: index of message m in its channel.
// O(events). REQUIRES: both ends of every channel list the same messages in the same order.
void check_deadlock(const Schedule& schedule,
                    Receives receives,
                    const Events& events,
                    const std::vector<int32_t>& number,
                    const Programs& programs);

}  // namespace megacore::pipeline
