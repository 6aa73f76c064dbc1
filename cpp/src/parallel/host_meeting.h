// Where the members of a HostComm wait for each other, and how they learn that one never comes.
//
// All state lies in the shared segment. A meeting is a counter: whoever arrives last starts the
// next round and wakes the others. Since nobody can run ahead by more than one round, equality
// tells whether a round is over, and counters may wrap around.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "megacore/parallel/host_comm.h"
#include "megacore/parallel/host_process.h"

namespace megacore::parallel {

enum class HostOp : uint8_t { kBarrier, kAllReduce, kReduceScatter, kAllGather, kBroadcast };

struct HostCall {
  HostOp op = HostOp::kBarrier;
  HostDtype dtype = HostDtype::kFloat32;
  HostReduction reduction = HostReduction::kSum;
  int32_t source = 0;  // broadcast only
  int64_t numel = 0;   // reduce_scatter, all_gather: per member

  friend bool operator==(const HostCall&, const HostCall&) = default;
};

std::string to_text(const HostCall& call);  // "all_reduce (sum) of 1024 float32"

// Why a group has become unusable.
enum class HostFailureKind : uint32_t { kTimedOut, kEnded, kLeft, kInterrupted };

// A cache line of one member. Zero until it joins.
struct alignas(64) HostMember {
  std::atomic<int32_t> pid;
  std::atomic<uint64_t> start_ticks;
  std::atomic<uint32_t> arrived;  // last round it came to
  std::atomic<uint32_t> has_left;
  std::atomic<uint32_t> is_blamed;  // for the group's failure
  alignas(64) HostCall calls[2];  // of the round's parity: written before the round, read after it
};

struct HostFailure {
  HostFailureKind kind;
  HostOp op;
};

// The front of the segment.
struct alignas(64) HostHeader {
  std::atomic<uint32_t> num_arrived;
  alignas(64) std::atomic<uint32_t> round;  // rounds completed; what sleepers watch
  std::atomic<uint32_t> num_sleepers;
  std::atomic<uint32_t> failure_stage;  // 0 none, 1 being written, 2 written
  HostFailure failure;
};

class HostMeeting {
 public:
  // `front` is the segment, big enough for a header and the members.
  HostMeeting(std::byte* front, const HostCommConfig& config);
  HostMeeting(const HostMeeting&) = delete;
  HostMeeting& operator=(const HostMeeting&) = delete;

  static int64_t front_bytes(int64_t num_members);

  // Waits until all members have come to their next call, and compares the calls.
  void begin(const HostCall& call);

  // Waits until all members are here, within a call that has begun.
  void meet();

  // Tells the others that this member will not come again.
  void leave();

 private:
  HostMember& me() { return members_[static_cast<size_t>(config_.position)]; }
  void wait_for(uint32_t round);
  void sleep_until(uint32_t round, double limit_s);
  bool is_over(uint32_t round) const;
  std::vector<int> missing(uint32_t round) const;
  void look_for_lost_members(uint32_t round);
  void compare_calls(size_t parity) const;
  void record_failure(HostFailureKind kind, const std::vector<int>& blamed);
  [[noreturn]] void throw_failure() const;
  void throw_if_failed() const;
  std::string who(int position) const;
  std::string blamed_text() const;
  std::string reason_text(HostFailureKind kind) const;

  const HostCommConfig& config_;
  HostHeader& header_;
  std::span<HostMember> members_;
  HostCall call_;
  uint32_t round_ = 0;
};

}  // namespace megacore::parallel
