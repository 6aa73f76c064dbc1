// Rows straight into the memory of peer GPUs and back: the CUDA twins of moe/peer_exchange.h.
//
// Every member has memory that all others reach: flags (moe::peer_flags_bytes), then what
// moe::PeerLayout describes, zero at first. A start launches a kernel that writes, there and here,
// and then raises this member's flag at every other one; a finish launches a kernel that waits for
// the flags of all, reads, and says so by another flag. Flags count up and are never reset, and the
// counters lie on the device, so all of it may be captured in a graph and replayed.
//
// Nothing here waits for the device or allocates, and no kernel waits for ever. One that has waited
// for `timeout_ns` writes a word that says for whom (parallel/epochs.h) to the state and gives up;
// so do all kernels after it, at once. Then rows are NaN and plans empty: the step is worthless,
// and the host must look at the word before it uses it.
//
// The addresses may all be of one GPU, which then plays all members, one launch after the other:
// first the starts of all, then the finishes.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "megacore/cuda/float_type.h"
#include "megacore/moe/peer_rows.h"

namespace megacore::cuda {

// What a member keeps to itself, on its device; zero at first.
struct PeerState {
  unsigned long long failure;               // 0, or what parallel::packed_failure made
  uint32_t epochs[moe::kPeerFlagSets];      // exchanges finished
  uint32_t blocks[2 * moe::kPeerFlagSets];  // blocks of the running kernel that are done
};

struct PeerView {
  std::byte* const* memory = nullptr;  // (num_members) on the device: the address of each one's
  PeerState* state = nullptr;
  int64_t position = 0;  // of this member
  moe::PeerLayout layout = {};
  int64_t timeout_ns = 0;
};

// Where the copies of tokens lie, see moe::PeerMap.
struct PeerCopies {
  const int64_t* rows = nullptr;
  int64_t num_tokens = 0;
  int64_t num_choices = 0;
  int64_t repeats = 1;
  int64_t capacity = 0;
};

struct PeerTensor {
  void* rows = nullptr;    // read by a start, written by a finish
  float* probs = nullptr;  // optional
  int64_t width = 0;
  FloatType type = FloatType::kFloat32;
};

// Experts chosen by this member's tokens, and the workspace of their sort. Without a workspace the
// caller sorts; with one there may be kMaxSortedExperts experts.
struct PeerChoices {
  const int64_t* experts = nullptr;  // (num_tokens, num_choices); outside of the experts: not sent
  int64_t num_tokens = 0;
  int64_t num_choices = 0;
  int32_t* workspace = nullptr;  // (peer_sort_numel)
};

int64_t peer_sort_numel(int64_t num_tokens, int64_t num_choices, int64_t num_experts);

// All throw std::invalid_argument where something does not fit the layout, std::runtime_error if a
// launch fails.
//
// Counts the choices, leaves the counts of tiles in the workspace, and sends those of all.
void peer_send_counts(const PeerView& peers,
                      const moe::PeerShape& shape,
                      const PeerChoices& choices,
                      cudaStream_t stream);
// Sends counts (num_experts).
void peer_send_sums(const PeerView& peers,
                    const moe::PeerShape& shape,
                    const int64_t* counts,
                    cudaStream_t stream);
void peer_plan(const PeerView& peers,
               const moe::PeerShape& shape,
               const moe::PeerPlan& plan,
               cudaStream_t stream);
// Writes the entries of all copies, (num_tokens, num_choices, repeats). With the workspace of
// `peer_send_counts` it sorts, and overwrites `sorted`; without, `sorted` has the order.
void peer_map_copies(const moe::PeerRouting& routing,
                     int64_t* sorted,
                     int32_t* workspace,
                     int64_t* map,
                     cudaStream_t stream);
void peer_start_push(const PeerView& peers,
                     int64_t slot,
                     const PeerTensor& tokens,
                     const PeerCopies& copies,
                     cudaStream_t stream);
// `num_arrived` is on the device; rows from there on are not written.
void peer_finish_push(const PeerView& peers,
                      int64_t slot,
                      const PeerTensor& rows,
                      const int64_t* num_arrived,
                      int64_t capacity,
                      cudaStream_t stream);
// Waits until all have read the slot. Then rows of a pull may be written to this member's memory of
// the slot, moe::PeerLayout::rows_offset, and peer_start_pull needs none.
void peer_reserve_pull(const PeerView& peers, int64_t slot, cudaStream_t stream);
// Must follow peer_reserve_pull.
void peer_start_pull(const PeerView& peers,
                     int64_t slot,
                     const PeerTensor& rows,
                     const int64_t* num_arrived,
                     int64_t capacity,
                     cudaStream_t stream);
void peer_finish_pull(const PeerView& peers,
                      int64_t slot,
                      const PeerTensor& tokens,
                      const PeerCopies& copies,
                      cudaStream_t stream);

}  // namespace megacore::cuda
