// Transfer of expert weights to their clones, and of clone gradients to the home ranks, through
// shared memory: the CPU version of the kernels in cuda/kernels/clone_exchange.cu.
//
//   CloneExchange clones(window, layout);   // all ranks; see HostComm::make_window
//   clones.open();                          // the slots here may be written
//   clones.push(0, weights, table);         // waits until all slots may be, then writes
//   clones.wait_for_weights(0);             // waits until all have pushed
//   ... clones compute with the weights here, and their gradients after reserve_grads(0) ...
//   clones.offer_grads(0);
//   clones.collect(0, dtype, total, table); // waits; adds the gradients of my experts' clones
//
// Ranks make all calls in the same order, for any plan. Memory is never read or overwritten too
// early:
// `push` waits for the ranks to open, `reserve_grads` until all have collected.
//
// Failures: as those of HostWindow, with a timeout.

#pragma once

#include <cstddef>
#include <cstdint>

#include "megacore/moe/clone_board.h"
#include "megacore/parallel/host_reduce.h"
#include "megacore/parallel/host_window.h"

namespace megacore::moe {

class CloneExchange {
 public:
  // Parts of a window that an exchange needs: opening, and weights and gradients by projection.
  static constexpr int64_t kWindowParts = 1 + 2 * kProjections;

  // REQUIRES: the window has kWindowParts parts and layout.bytes(ranks) bytes, and outlives this.
  CloneExchange(parallel::HostWindow& window, const CloneLayout& layout);

  void open();
  void push(int64_t projection, const std::byte* weights, const CloneTable& table);
  void wait_for_weights(int64_t projection);
  void reserve_grads(int64_t projection);
  void offer_grads(int64_t projection);

  // Adds to the experts of `total` the gradients of their clones, by (rank, slot).
  // REQUIRES: kFloat32 or kFloat64, of whose elements grads are as well.
  void collect(int64_t projection,
               parallel::HostDtype dtype,
               std::byte* total,
               const CloneTable& table);

 private:
  std::byte* weights(int position, int64_t projection) const;
  std::byte* grads(int position, int64_t projection) const;
  void check(const CloneTable& table) const;

  parallel::HostWindow& window_;
  CloneLayout layout_;
  bool is_opening_ = false;  // nobody has waited for the others to open yet
};

}  // namespace megacore::moe
