// Brings rows to the members of a group and back through memory that they share: the CPU's twin of
// the kernels in cuda/kernels/peer_rows.cu. Where rows lie is said by peer_rows.h.
//
//   PeerExchange peers(window, layout);             // all members; see HostComm::make_window
//   peers.send_counts(counts, shape);
//   peers.plan(shape, plan);                        // waits for the counts of all
//   peers.start_push(0, tokens, map);               // writes each copy where its expert is
//   const int64_t n = peers.finish_push(0, rows, 100);   // waits until all have; copies them out
//   peers.start_pull(0, results, n);                // shows results to all
//   peers.finish_pull(0, sums, map);                // waits; adds up the results of each token
//
// A push and a pull are each other's derivative. Members call all of them in the same order. Slots
// are independent: what was started in one is finished before the next start there. No reset is
// ever needed, whatever the number of exchanges: before it writes, a start waits until all members
// have finished with what was in the slot.
//
// Failures: as those of HostWindow, in bounded time. std::invalid_argument for a map that points
// outside of the buffers.

#pragma once

#include <cstddef>
#include <cstdint>

#include "megacore/moe/peer_rows.h"
#include "megacore/parallel/host_reduce.h"
#include "megacore/parallel/host_window.h"

namespace megacore::moe {

// Rows with a number beside each: the tokens of a member, or the rows of its experts.
struct PeerRows {
  std::byte* rows = nullptr;
  float* probs = nullptr;  // optional: then none travel
  int64_t width = 0;       // elements of a row
  parallel::HostDtype dtype = parallel::HostDtype::kFloat32;

  int64_t row_bytes() const { return width * parallel::bytes_of(dtype); }
};

// Where the copies of tokens lie. Token t's choice j goes to `repeats` members: its probability is
// probs[t * num_choices + j], its rows are rows[(t * num_choices + j) * repeats + i].
struct PeerMap {
  const int64_t* rows = nullptr;  // member * capacity + row, or -1
  int64_t num_tokens = 0;
  int64_t num_choices = 0;
  int64_t repeats = 1;
  int64_t capacity = 0;
};

class PeerExchange {
 public:
  // Parts of a window that an exchange needs.
  static constexpr int64_t kWindowParts = kPeerFlagSets;

  // REQUIRES: the window has kWindowParts parts and layout.bytes() bytes, and outlives this.
  PeerExchange(parallel::HostWindow& window, const PeerLayout& layout);

  // Tells all members how many copies go to each expert.
  void send_counts(const int64_t* counts, const PeerShape& shape);

  // Waits for the counts of all and writes the plan.
  // Throws std::invalid_argument if a member has another capacity.
  void plan(const PeerShape& shape, const PeerPlan& plan);

  // Writes the rows of `tokens` to where the map says.
  void start_push(int64_t slot, const PeerRows& tokens, const PeerMap& map);

  // Waits for what was pushed here and copies it out: the first `num_arrived` rows of `capacity`,
  // zeros behind them.
  void finish_push(int64_t slot, const PeerRows& to, int64_t num_arrived, int64_t capacity);

  // Shows the first `num_rows` rows to all members.
  void start_pull(int64_t slot, const PeerRows& from, int64_t num_rows);

  // Waits for the rows of all and writes, for each token, the sum of those that the map names, in
  // its order (in fp32 for narrower types); and for each choice the sum of its numbers.
  void finish_pull(int64_t slot, const PeerRows& tokens, const PeerMap& map);

 private:
  std::byte* rows(int64_t slot, int64_t member) const;
  float* probs(int64_t slot, int64_t member) const;
  int64_t* messages(int64_t member) const;
  void check_slot(int64_t slot, const PeerRows& rows, int64_t num_rows) const;
  void check_map(const PeerMap& map) const;

  parallel::HostWindow& window_;
  PeerLayout layout_;
};

}  // namespace megacore::moe
