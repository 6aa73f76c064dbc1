// Memory of every member of a group that all members can read: collectives without staging copies.
//
// A window is split into numbered parts (the buckets of a buffer). A member *offers* a part of its
// memory when that part is final; other members read it there, as soon as all have offered it. So
// there are no messages: a collective is offered when its data are ready, and each member does its
// work later, at a time of its choice.
//
//   std::unique_ptr<HostWindow> window = comm.make_window(bytes, num_parts);   // all members
//   ... write to window->data() ...
//   window->offer(0);                                  // returns at once
//   if (window->is_offered(0)) ...                     // a look, no wait
//   window->reduce_scatter({.part = 0, ...});          // waits for the others' offers
//   window->wait_until_taken(0);                       // now the part may be written again
//
// Members offer and take each part alternately, any number of times. Different parts are
// independent.
// The sums are those of reduce_parts, in the order of positions.
//
// Failures. Every wait has a timeout: std::runtime_error when a member has ended or left, or has
// not arrived within the group's timeout.
//
// Threads: one call at a time. A window cannot be used after a fork.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "megacore/parallel/host_comm.h"
#include "megacore/parallel/host_reduce.h"
#include "megacore/parallel/host_segment.h"

namespace megacore::parallel {

struct WindowMember;  // the front of a member's segment

class HostWindow {
 public:
  // Size of a segment with `bytes` of data.
  static int64_t segment_bytes(int64_t bytes, int64_t num_parts);

  // `segments` are those of all members in order, all zero before the first of them constructs a
  // window. Usually made by HostComm::make_window.
  HostWindow(std::vector<HostSegment> segments, int64_t num_parts, HostCommConfig config);

  // Leaves: a member that waits for this one fails at once.
  ~HostWindow();

  HostWindow(const HostWindow&) = delete;
  HostWindow& operator=(const HostWindow&) = delete;

  std::byte* data() const { return data(config_.position); }
  // The memory of any member, for reads and writes. Members synchronize access with the calls
  // below.
  std::byte* data(int position) const;
  int64_t bytes() const { return bytes_; }
  int64_t num_parts() const { return static_cast<int64_t>(rounds_.size()); }
  int size() const { return static_cast<int>(config_.ranks.size()); }
  int position() const { return config_.position; }
  const std::vector<int>& ranks() const { return config_.ranks; }

  // Publishes that `part` is final here. It must not change until wait_until_taken.
  void offer(int64_t part);

  // Whether all members have offered `part`. Does not wait.
  bool is_offered(int64_t part) const;

  // `size() * numel` elements at `offset` bytes of every member's data, inside `part`.
  struct Task {
    int64_t part = 0;
    int64_t offset = 0;
    int64_t numel = 0;  // per member
    HostDtype dtype = HostDtype::kFloat32;
    HostReduction reduction = HostReduction::kSum;  // reduce_scatter only
  };

  // Writes the reduction of the members' elements [p * numel, (p + 1) * numel), p this member's
  // position, over its own elements. Waits until all have offered the part.
  // REQUIRES: the part was offered; kAvg needs a floating point type.
  void reduce_scatter(const Task& task);

  // Copies elements [p * numel, (p + 1) * numel) of every other member p to the same place here.
  // Waits until all have offered the part.
  // REQUIRES: the part was offered.
  void all_gather(const Task& task);

  // For other exchanges: returns when all members have offered `part`. This member may then read
  // from any member, and must `take` the part afterwards.
  // REQUIRES: the part was offered.
  void wait_until_offered(int64_t part);
  void take(int64_t part);

  // Returns when no member needs the last offer of `part`; at once if it was never offered.
  void wait_until_taken(int64_t part);

  // Messages: a part that only one member offers and only one other takes. The receiver waits for
  // the `round`-th offer, reads from data(sender), and takes it; then the sender may write the next
  // one. Both waits return false if that has not happened after `limit_s`, and throw as above.
  bool wait_for_offer_of(int position, int64_t part, uint32_t round, double limit_s);
  void take_from(int position, int64_t part, uint32_t round);
  bool wait_for_take_by(int position, int64_t part, double limit_s);

 private:
  using Flags = std::span<std::atomic<uint32_t>>;
  using FlagsOf = Flags (HostWindow::*)(int) const;

  struct Positions {
    int begin;
    int end;
  };
  struct Wait {
    uint32_t round;  // that the flags of all positions must reach
    FlagsOf flags;
    const char* what;  // for messages
  };

  WindowMember& member(int position) const;
  Flags offered(int position) const;
  Flags taken(int position) const;
  void check_task(const Task& task) const;
  void finish(int64_t part);
  void check_message(int position, int64_t part) const;
  void wait_for_all(int64_t part, FlagsOf flags, const char* what);
  bool wait_for(Positions positions, int64_t part, const Wait& wait, double limit_s);
  bool is_lost(int position) const;
  [[noreturn]] void throw_lost(int position, int64_t part, const char* what) const;
  std::string who(const std::vector<int>& positions) const;
  std::string about(int64_t part, const char* what) const;

  std::vector<HostSegment> segments_;
  HostCommConfig config_;
  int64_t bytes_;
  std::vector<uint32_t> rounds_;  // offers of this member, by part
  int64_t owner_pid_;
};

}  // namespace megacore::parallel
