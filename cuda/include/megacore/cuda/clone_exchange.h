// Weights of experts go to their clones, gradients of clones come home, by kernels that write into
// and read from the memory of peer GPUs: see megacore/moe/clone_board.h for who writes what, and
// megacore/moe/clone_exchange.h for the same on the CPU.
//
// Nothing allocates and the host waits for nothing: the slot table is read on the device, so a
// captured graph may be replayed with other plans. Flags are raised per slot and projection. A
// kernel waits for a peer for a bounded time; then it leaves a word in `failure`, as does all that
// follows, and moves nothing.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "megacore/moe/clone_board.h"

namespace megacore::cuda {

struct CloneView {
  std::byte* const* memory = nullptr;  // (ranks) on the device: memory of each rank, zero at first
  unsigned long long* failure = nullptr;  // (1) on the device, zero at first
  moe::CloneLayout layout = {};
  moe::CloneTable table = {};
  int64_t timeout_ns = 0;
};

// The slots here may be written: all that was queued before has used them.
void clones_open(const CloneView& view, cudaStream_t stream);

// Writes home experts, (local, bytes of a slot), to where the table has clones of them, each when
// its slot is open.
void clones_push(const CloneView& view,
                 int64_t projection,
                 const std::byte* weights,
                 cudaStream_t stream);

// Waits until the weights of all clones here have come.
void clones_wait(const CloneView& view, int64_t projection, cudaStream_t stream);

// Waits until the gradients offered before have been read.
void clones_reserve_grads(const CloneView& view, int64_t projection, cudaStream_t stream);

void clones_offer_grads(const CloneView& view, int64_t projection, cudaStream_t stream);

// Adds to `total`, (local, floats of a slot), the gradients of the clones of each expert, by (rank,
// slot): one thread per element.
void clones_collect(const CloneView& view, int64_t projection, float* total, cudaStream_t stream);

}  // namespace megacore::cuda
