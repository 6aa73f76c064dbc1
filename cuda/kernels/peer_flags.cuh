// How kernels hand memory over between peers, see megacore/cuda/peer_exchange.h.
//
// A kernel that writes ends every thread's part by a fence of the whole system; the last block to
// get there then raises the flags with release semantics. A kernel that reads begins, in every
// block, by looking at its own flags with acquire semantics: flags are written into the memory of
// who waits, so that waiting causes no traffic. Data that peers write is never read through
// pointers that the compiler could take for constant memory.

#pragma once

#include "megacore/base/check.h"
#include "megacore/cuda/peer_exchange.h"
#include "megacore/parallel/epochs.h"
#include "row_io.cuh"
#include "system_memory.cuh"

namespace megacore::cuda {

using parallel::PeerFault;

__device__ __forceinline__ uint32_t* flags_of(const PeerView& peers, int64_t member) {
  return reinterpret_cast<uint32_t*>(peers.memory[member]);
}
__device__ __forceinline__ std::byte* data_of(const PeerView& peers, int64_t member) {
  return peers.memory[member] + moe::peer_flags_bytes(peers.layout.num_members);
}

__device__ __forceinline__ uint32_t epoch_of(const PeerView& peers, int64_t set) {
  return *const_cast<volatile uint32_t*>(&peers.state->epochs[set]) + 1;
}

__device__ __forceinline__ bool has_failed(const PeerView& peers) {
  return *const_cast<volatile unsigned long long*>(&peers.state->failure) != 0;
}

__device__ __forceinline__ void fail(const PeerView& peers,
                                     PeerFault fault,
                                     int64_t member,
                                     uint32_t epoch) {
  const int64_t word = parallel::packed_failure({fault, member, epoch});
  atomicCAS(&peers.state->failure, 0ULL, static_cast<unsigned long long>(word));
}

// All threads of a block call it; false, for all, if a member did not come in time now or before.
__device__ __forceinline__ bool wait_for_all(
    const PeerView& peers, int64_t set, bool is_taken, uint32_t epoch, PeerFault fault) {
  const int64_t members = peers.layout.num_members;
  bool have_come = true;
  for (int64_t member = threadIdx.x; member < members; member += kRowThreads) {
    const uint32_t* flag =
        flags_of(peers, peers.position) + moe::peer_flag(members, set, is_taken, member);
    const uint64_t start = now_ns();
    while (have_come && !parallel::has_reached(load_acquire(flag), epoch)) {
      if (has_failed(peers)) {
        have_come = false;
      } else if (now_ns() - start > static_cast<uint64_t>(peers.timeout_ns)) {
        fail(peers, fault, member, epoch);
        have_come = false;
      } else {
        __nanosleep(64);
      }
    }
  }
  return __syncthreads_and(have_come && !has_failed(peers)) != 0;
}

// All threads of all blocks call it when they are done; true, for all, in the last block.
__device__ __forceinline__ bool is_last_block(const PeerView& peers,
                                              int64_t set,
                                              bool is_taken,
                                              uint32_t epoch) {
  __shared__ bool is_last;
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t* done = &peers.state->blocks[2 * set + (is_taken ? 1 : 0)];
    is_last = atomicAdd(done, 1U) == gridDim.x - 1;
    if (is_last) {
      *done = 0;
      if (is_taken) {
        peers.state->epochs[set] = epoch;
      }
    }
    __threadfence_system();
  }
  __syncthreads();
  return is_last;
}

// Threads of one block call it, after a fence of the system.
__device__ __forceinline__ void raise_flags(const PeerView& peers,
                                            int64_t set,
                                            bool is_taken,
                                            uint32_t epoch) {
  const int64_t members = peers.layout.num_members;
  for (int64_t member = threadIdx.x; member < members; member += kRowThreads) {
    store_release(flags_of(peers, member) + moe::peer_flag(members, set, is_taken, peers.position),
                  epoch);
  }
}

// All threads of all blocks call it when they are done. The last block notifies all members, also
// after a failure, so that they report the member that did not arrive.
__device__ __forceinline__ void tell_all(const PeerView& peers,
                                         int64_t set,
                                         bool is_taken,
                                         uint32_t epoch) {
  if (is_last_block(peers, set, is_taken, epoch)) {
    raise_flags(peers, set, is_taken, epoch);
  }
}

// ---- host side ----------------------------------------------------------------------------------

inline void require_view(const PeerView& peers) {
  const int64_t members = peers.layout.num_members;
  MC_REQUIRE(members >= 1 && members < (int64_t{1} << 16) && peers.position >= 0 &&
                 peers.position < members,
             "position {} is not among {} members", peers.position, members);
  MC_REQUIRE(peers.timeout_ns > 0, "a wait must have a limit, not {} ns", peers.timeout_ns);
}

}  // namespace megacore::cuda
