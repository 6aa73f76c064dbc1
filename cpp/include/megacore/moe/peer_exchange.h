// Exchange of rows between the members of a group through shared memory: the CPU version of the
// kernels in cuda/kernels/peer_rows.cu. For the layout of rows, see peer_rows.h.
//
//   PeerExchange peers(window, layout);             // all members; see HostComm::make_window
//   peers.plan_copies(shape, routing, plan, map);   // exchanges the counts of all
//   peers.start_push(0, tokens, map);               // writes each copy where its expert is
//   const int64_t n = peers.finish_push(0, rows, 100);   // waits until all have; copies them out
//   peers.reserve_pull(0);                          // waits; results may now go to the slot
//   peers.start_pull(0, results, n);                // shows results to all
//   peers.finish_pull(0, sums, map);                // waits; adds up the results of each token
//
// A push and a pull are each other's derivative. Members make all calls in the same order. Slots
// are independent: an operation in a slot is finished before the next start in it. No reset is ever
// needed: before it writes, a start waits until all members have finished with the previous
// contents of the slot.
//
// Failures: as those of HostWindow, with a timeout. std::invalid_argument for a map with rows
// outside of the buffers.

#pragma once

#include <cstddef>
#include <cstdint>

#include "megacore/moe/peer_rows.h"
#include "megacore/parallel/host_reduce.h"
#include "megacore/parallel/host_window.h"

namespace megacore::moe {

// Rows with one number each: the tokens of a member, or the rows of its experts.
struct PeerRows {
  std::byte* rows = nullptr;
  float* probs = nullptr;  // optional: then none travel
  int64_t width = 0;       // elements of a row
  parallel::HostDtype dtype = parallel::HostDtype::kFloat32;

  int64_t row_bytes() const { return width * parallel::bytes_of(dtype); }
};

// Rows of the copies of tokens. Token t's choice j goes to `repeats` members: its probability is
// probs[t * num_choices + j], its rows are rows[(t * num_choices + j) * repeats + i].
struct PeerMap {
  const int64_t* rows = nullptr;  // entries, see peer_rows.h
  int64_t num_tokens = 0;
  int64_t num_choices = 0;
  int64_t repeats = 1;
  int64_t capacity = 0;
};

// Writes the entries of all copies, (num_tokens, num_choices, repeats).
// Throws std::invalid_argument if a size is out of range.
void map_copies(const PeerRouting& routing, int64_t* map);

class PeerExchange {
 public:
  // Parts of a window that an exchange needs.
  static constexpr int64_t kWindowParts = kPeerFlagSets;

  // REQUIRES: the window has kWindowParts parts and layout.bytes() bytes, and outlives this.
  PeerExchange(parallel::HostWindow& window, const PeerLayout& layout);

  // Sorts the copies by expert, exchanges their numbers, and writes the plan and the entries of all
  // copies. `sorted` and `shift` of the routing are not read.
  void plan_copies(const PeerShape& shape,
                   const PeerRouting& routing,
                   const PeerPlan& plan,
                   int64_t* map);

  // Sends the number of copies for each expert to all members.
  void send_counts(const int64_t* counts, const PeerShape& shape);

  // Waits for the counts of all and writes the plan.
  // Throws std::invalid_argument if a member has another capacity.
  void plan(const PeerShape& shape, const PeerPlan& plan);

  // Writes the rows of `tokens` to the rows of the map, each at most once to a member.
  void start_push(int64_t slot, const PeerRows& tokens, const PeerMap& map);

  // Waits for the rows pushed here and copies them out: the first `num_arrived` rows of `capacity`.
  // The others are not written.
  void finish_push(int64_t slot, const PeerRows& to, int64_t num_arrived, int64_t capacity);

  // Waits until the slot is free; returns the address of this member's rows of a pull in it. They
  // may be written there, for a start_pull without rows.
  std::byte* reserve_pull(int64_t slot);

  // Publishes the first `num_rows` rows to all members. Null rows are in the slot already.
  void start_pull(int64_t slot, const PeerRows& from, int64_t num_rows);

  // Waits for the rows of all and writes, for each token, the sum of its rows in the map, in order
  // (in fp32 for narrower types); and for each choice the sum of its numbers.
  void finish_pull(int64_t slot, const PeerRows& tokens, const PeerMap& map);

 private:
  std::byte* rows(int64_t slot, int64_t member) const;
  float* probs(int64_t slot, int64_t member) const;
  uint32_t* sources(int64_t slot, int64_t member) const;
  int64_t* messages(int64_t member) const;
  static void check_slot(int64_t slot);
  void check_rows(int64_t slot, const PeerRows& rows, int64_t num_rows) const;
  void check_map(const PeerMap& map) const;

  parallel::HostWindow& window_;
  PeerLayout layout_;
};

}  // namespace megacore::moe
