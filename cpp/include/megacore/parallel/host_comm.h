// Collectives among processes of one host, through shared memory.
//
// Every member has two slots in one segment. A member copies a chunk of its tensor into a slot,
// meets the others, and reads from their slots; the two slots alternate, so one meeting per chunk
// is sufficient. Tensors of any size are transferred in chunks. A waiting member first yields its
// core and then sleeps, so members may outnumber cores.
//
//   auto segment = HostSegment::create(HostComm::segment_bytes(2, 1 << 20));  // in one process
//   HostComm comm(std::move(segment), {.position = 0, .ranks = {0, 1}});
//   HostComm comm(HostSegment::open(pid, file, ...), {.position = 1, .ranks = {0, 1}});  // others
//   comm.all_reduce(data, numel, HostDtype::kFloat32, HostReduction::kSum);
//
// Results. Sums run in the order of positions, as in reduce_parts, for any slot size: all members
// get the same bits, and reduce_scatter equals the slice of an all_reduce.
//
// Failures. Every wait has a timeout. std::runtime_error is thrown, by every member, when
//   - the members are in different calls (the message has both; the group remains usable);
//   - a member has ended, which the others detect within about 0.1 s;
//   - a member has not arrived within `timeout_s`, which applies to each meeting;
//   - `while_waiting` threw at a member (which rethrows that exception).
// The last three leave the group unusable: every later call repeats the reason.
//
// Threads: one call at a time per communicator. A communicator cannot be used after a fork.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "megacore/parallel/host_reduce.h"
#include "megacore/parallel/host_segment.h"

namespace megacore::parallel {

class HostWindow;   // see host_window.h
struct HostCall;    // one call as its caller made it, for comparison
class HostMeeting;  // where members wait for each other

struct HostCommConfig {
  int position = 0;              // this member, an index of `ranks`
  std::vector<int> ranks;        // global rank of every member; for messages
  int64_t slot_bytes = 1 << 20;  // a multiple of 64, at least 64 per member
  double timeout_s = 120.0;      // how long to wait for a member
  // Called repeatedly during a long wait, and after a signal.
  std::function<void()> while_waiting = {};
};

class HostComm {
 public:
  // Size of the segment of a group.
  static int64_t segment_bytes(int64_t num_members, int64_t slot_bytes);

  // Joins the group. The segment must be all zero before the first member joins, and all members
  // must pass the same ranks and slot_bytes.
  // Throws std::invalid_argument for a configuration that violates these rules.
  HostComm(HostSegment segment, HostCommConfig config);

  // Leaves the group: a member that waits for this one fails at once.
  ~HostComm();

  HostComm(const HostComm&) = delete;
  HostComm& operator=(const HostComm&) = delete;

  int position() const { return config_.position; }
  int size() const { return static_cast<int>(config_.ranks.size()); }
  int64_t slot_bytes() const { return config_.slot_bytes; }
  double timeout_s() const { return config_.timeout_s; }
  HostSegment& segment() { return segment_; }

  // Returns when every member has called it.
  void barrier();

  // Replaces `data` by its reduction over the members.
  // REQUIRES: kAvg needs a floating point type.
  void all_reduce(std::byte* data, int64_t numel, HostDtype dtype, HostReduction reduction);

  struct ReduceScatter {
    std::byte* output = nullptr;  // `numel` elements; may overlap the input
    HostDtype output_dtype = HostDtype::kFloat32;
    const std::byte* input = nullptr;  // size() * numel elements
    HostDtype dtype = HostDtype::kFloat32;
    int64_t numel = 0;  // per member
    HostReduction reduction = HostReduction::kSum;
  };

  // Gives member p elements [p * numel, (p + 1) * numel) of the reduction.
  // REQUIRES: can_reduce(dtype, output_dtype), and kAvg needs a floating point type.
  void reduce_scatter(const ReduceScatter& task);

  // Writes the `numel` elements of member p to output + p * numel. `input` may overlap the output.
  void all_gather(std::byte* output, const std::byte* input, int64_t numel, HostDtype dtype);

  // Copies the data of the member at `source` to all.
  void broadcast(std::byte* data, int64_t numel, HostDtype dtype, int source);

  // Allocates `bytes` of zeroed memory per member that the others can read. All members call it
  // together with equal arguments. Null on every member if one allocation fails.
  // REQUIRES: bytes >= 1, num_parts >= 1.
  std::unique_ptr<HostWindow> make_window(int64_t bytes, int64_t num_parts);

 private:
  class Use;

  // Switches to the other slot of every member. Once per chunk and call, so that all members agree.
  void turn();
  // Meets the others for the chunk that begins at element `start`; the first meeting compares
  // calls.
  void meet(const HostCall& call, int64_t start);
  std::byte* slot(int position) const;
  std::byte* my_slot() const { return slot(config_.position); }
  void reduce_piece(std::byte* data, int64_t numel, HostDtype dtype, HostReduction reduction);
  void reduce_scatter_pieces(const ReduceScatter& task);
  void check_call(int64_t numel, HostDtype dtype, HostReduction reduction) const;

  HostSegment segment_;
  HostCommConfig config_;
  std::byte* slots_;
  int64_t turns_ = 0;
  std::unique_ptr<HostMeeting> meeting_;
  int64_t owner_pid_;
  std::atomic<bool> in_use_ = false;
};

}  // namespace megacore::parallel
