// See megacore/cuda/clone_exchange.h.
//
// Flags are polled with acquire semantics, and set with release semantics after a fence of the
// whole system. A block that has finished its part of a slot increments a counter of its own GPU,
// and the last block sets the slot's flag: a slot can be used or overwritten while others are
// copied.

#include <cmath>

#include "launch.h"
#include "megacore/base/check.h"
#include "megacore/cuda/clone_exchange.h"
#include "megacore/parallel/epochs.h"
#include "row_io.cuh"
#include "system_memory.cuh"

namespace megacore::cuda {
namespace {

using moe::CloneLayout;
using moe::ClonePass;
using parallel::PeerFault;

constexpr int kThreads = kRowThreads;
// Few enough to leave most of a GPU to the experts meanwhile.
constexpr int64_t kBlocks = 32;

__device__ __forceinline__ uint32_t* flags_of(const CloneView& view, int64_t rank) {
  return reinterpret_cast<uint32_t*>(view.memory[rank]);
}
__device__ __forceinline__ uint32_t* own_flags(const CloneView& view) {
  return flags_of(view, view.table.position);
}
__device__ __forceinline__ uint32_t counter(const CloneView& view, int64_t number) {
  return *const_cast<volatile uint32_t*>(own_flags(view) + CloneLayout::counter_word(number));
}

__device__ __forceinline__ bool has_failed(const CloneView& view) {
  return *const_cast<volatile unsigned long long*>(view.failure) != 0;
}

// One thread waits; false if the flag was not raised in time, now or before.
__device__ __forceinline__ bool wait_for(
    const CloneView& view, const uint32_t* flag, uint32_t epoch, int64_t rank, PeerFault fault) {
  const uint64_t start = now_ns();
  while (!parallel::has_reached(load_acquire(flag), epoch)) {
    if (has_failed(view)) {
      return false;
    }
    if (now_ns() - start > static_cast<uint64_t>(view.timeout_ns)) {
      const int64_t word = parallel::packed_failure({fault, rank, epoch});
      atomicCAS(view.failure, 0ULL, static_cast<unsigned long long>(word));
      return false;
    }
    __nanosleep(64);
  }
  return !has_failed(view);
}

// All threads of a block call it.
__device__ __forceinline__ bool block_waits(
    const CloneView& view, const uint32_t* flag, uint32_t epoch, int64_t rank, PeerFault fault) {
  const bool has_come = threadIdx.x != 0 || wait_for(view, flag, epoch, rank, fault);
  return __syncthreads_and(has_come) != 0;
}

// All threads of all blocks call it after their part of slot `index`; the last block sets the flag.
__device__ __forceinline__ void finish_slot(const CloneView& view,
                                            ClonePass pass,
                                            int64_t projection,
                                            int64_t index,
                                            uint32_t* flag,
                                            uint32_t epoch) {
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t* arrivals =
        own_flags(view) + view.layout.arrivals_word(pass, projection, view.table.num_ranks, index);
    if (atomicAdd(arrivals, 1U) == gridDim.x - 1) {
      *arrivals = 0;
      __threadfence_system();
      store_release(flag, epoch);
    }
  }
}

// The slot `index` of all slots, and the local home expert whose clone lies there; below 0 for
// none.
struct CloneAt {
  int64_t rank;
  int64_t slot;
  int64_t expert;
};
__device__ __forceinline__ CloneAt clone_at(const CloneView& view, int64_t index) {
  const int64_t num_slots = view.table.num_slots;
  return {
      .rank = index / num_slots, .slot = index % num_slots, .expert = view.table.my_expert(index)};
}

__global__ void open_kernel(CloneView view) {
  uint32_t* flags = own_flags(view);
  const uint32_t epoch = counter(view, 0) + 1;
  flags[CloneLayout::counter_word(0)] = epoch;
  __threadfence_system();
  store_release(flags + CloneLayout::released_word(), epoch);
}

__device__ __forceinline__ float sum_of(float a, float b) { return a + b; }
__device__ __forceinline__ float4 sum_of(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// Adds words of a slot to the sum. A word always belongs to the same thread, so an expert's clones
// are added in the order of their slots.
template <typename Word>
__device__ __forceinline__ void add_words(float* to, const float* from, int64_t numel) {
  auto* sums = reinterpret_cast<Word*>(to);
  const auto* grads = reinterpret_cast<const Word*>(from);
  const int64_t step = int64_t{gridDim.x} * kThreads;
  const int64_t words =
      numel * static_cast<int64_t>(sizeof(float)) / static_cast<int64_t>(sizeof(Word));
  int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; first + (kLoadsInFlight - 1) * step < words; first += kLoadsInFlight * step) {
    Word added[kLoadsInFlight];
    Word before[kLoadsInFlight];
#pragma unroll
    for (int n = 0; n < kLoadsInFlight; ++n) {
      added[n] = grads[first + n * step];
    }
#pragma unroll
    for (int n = 0; n < kLoadsInFlight; ++n) {
      before[n] = sums[first + n * step];
    }
#pragma unroll
    for (int n = 0; n < kLoadsInFlight; ++n) {
      sums[first + n * step] = sum_of(before[n], added[n]);
    }
  }
  for (; first < words; first += step) {
    sums[first] = sum_of(sums[first], grads[first]);
  }
}

__global__ void __launch_bounds__(kThreads)
    push_kernel(CloneView view, int64_t projection, const std::byte* weights, bool is_packed) {
  const uint32_t epoch = counter(view, 0);
  const int64_t bytes = view.layout.weight_bytes[projection];
  const int64_t offset = view.layout.weights_offset(view.table.num_ranks, projection);
  for (int64_t index = 0; index < view.table.num_ranks * view.table.num_slots; ++index) {
    const auto [rank, slot, expert] = clone_at(view, index);
    if (expert < 0) {
      continue;
    }
    const uint32_t* is_open = flags_of(view, rank) + CloneLayout::released_word();
    if (!block_waits(view, is_open, epoch, rank, PeerFault::kStillReads)) {
      return;
    }
    std::byte* to = view.memory[rank] + offset + slot * bytes;
    const std::byte* from = weights + expert * bytes;
    if (is_packed) {
      copy_words(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from), bytes / 16);
    } else {
      copy_words(reinterpret_cast<uint16_t*>(to), reinterpret_cast<const uint16_t*>(from),
                 bytes / 2);
    }
    finish_slot(view, ClonePass::kWeights, projection, index,
                flags_of(view, rank) + view.layout.ready_word(projection, slot), epoch);
  }
}

__global__ void __launch_bounds__(kThreads) wait_kernel(CloneView view, int64_t projection) {
  const uint32_t epoch = counter(view, 0);
  for (int64_t slot = threadIdx.x; slot < view.table.num_slots; slot += kThreads) {
    if (view.table.is_used_here(slot)) {
      const int64_t index = view.table.position * view.table.num_slots + slot;
      wait_for(view, own_flags(view) + view.layout.ready_word(projection, slot), epoch,
               view.table.slot_expert[index] / view.table.num_local(), PeerFault::kNoRows);
    }
  }
}

__global__ void __launch_bounds__(kThreads) reserve_kernel(CloneView view, int64_t projection) {
  const uint32_t* flags = own_flags(view);
  for (int64_t slot = threadIdx.x; slot < view.table.num_slots; slot += kThreads) {
    wait_for(view, flags + view.layout.taken_word(projection, slot),
             flags[view.layout.offered_word(projection, slot)], view.table.position,
             PeerFault::kStillReads);
  }
}

__global__ void __launch_bounds__(kThreads) offer_kernel(CloneView view, int64_t projection) {
  uint32_t* flags = own_flags(view);
  const uint32_t epoch = counter(view, 1 + projection) + 1;
  if (has_failed(view)) {
    // A home may still read what this rank has just overwritten: its sum must not look valid.
    const int64_t bytes = view.layout.grad_bytes[projection];
    std::byte* grads = view.memory[view.table.position] +
                       view.layout.grads_offset(view.table.num_ranks, projection);
    for (int64_t slot = threadIdx.x; slot < view.table.num_slots && bytes > 0; slot += kThreads) {
      *reinterpret_cast<float*>(grads + slot * bytes) = NAN;
    }
  }
  __threadfence_system();
  for (int64_t slot = threadIdx.x; slot < view.table.num_slots; slot += kThreads) {
    if (view.table.is_used_here(slot)) {
      store_release(flags + view.layout.offered_word(projection, slot), epoch);
    }
  }
  __syncthreads();  // all have read the counter
  if (threadIdx.x == 0) {
    flags[CloneLayout::counter_word(1 + projection)] = epoch;
  }
}

__global__ void __launch_bounds__(kThreads)
    collect_kernel(CloneView view, int64_t projection, float* total, bool is_packed) {
  const uint32_t epoch = counter(view, 1 + projection);
  const int64_t bytes = view.layout.grad_bytes[projection];
  const int64_t numel = bytes / static_cast<int64_t>(sizeof(float));
  const int64_t offset = view.layout.grads_offset(view.table.num_ranks, projection);
  if (has_failed(view) && blockIdx.x == 0 && threadIdx.x == 0) {
    total[0] = NAN;  // keeps the optimizer from using what stale weights gave
  }
  for (int64_t index = 0; index < view.table.num_ranks * view.table.num_slots; ++index) {
    const auto [rank, slot, expert] = clone_at(view, index);
    if (expert < 0) {
      continue;
    }
    uint32_t* flags = flags_of(view, rank);
    const uint32_t* is_offered = flags + view.layout.offered_word(projection, slot);
    if (!block_waits(view, is_offered, epoch, rank, PeerFault::kNoRows)) {
      if (threadIdx.x == 0) {
        total[expert * numel] = NAN;
      }
      return;
    }
    const auto* grads = reinterpret_cast<const float*>(view.memory[rank] + offset + slot * bytes);
    float* sums = total + expert * numel;
    if (is_packed) {
      add_words<float4>(sums, grads, numel);
    } else {
      add_words<float>(sums, grads, numel);
    }
    finish_slot(view, ClonePass::kGrads, projection, index,
                flags + view.layout.taken_word(projection, slot), epoch);
  }
}

void require_view(const CloneView& view, int64_t projection) {
  const moe::CloneTable& table = view.table;
  moe::require_projection(projection);
  MC_REQUIRE(table.num_ranks >= 1 && table.num_experts >= table.num_ranks &&
                 table.num_experts % table.num_ranks == 0 &&
                 table.num_slots == view.layout.num_slots && table.position >= 0 &&
                 table.position < table.num_ranks,
             "a table of {} ranks with {} slots and {} experts does not fit memory with {} slots",
             table.num_ranks, table.num_slots, table.num_experts, view.layout.num_slots);
}

}  // namespace

void clones_open(const CloneView& view, cudaStream_t stream) {
  require_view(view, 0);
  launch("clones_open", open_kernel, {.threads = 1}, stream, view);
}

void clones_push(const CloneView& view,
                 int64_t projection,
                 const std::byte* weights,
                 cudaStream_t stream) {
  require_view(view, projection);
  const int64_t bytes = view.layout.weight_bytes[projection];
  MC_REQUIRE(bytes % 2 == 0, "an expert has {} bytes; it must be a multiple of 2", bytes);
  const bool is_packed = bytes % 16 == 0 && reinterpret_cast<uintptr_t>(weights) % 16 == 0;
  launch("clones_push", push_kernel, {.blocks = kBlocks, .threads = kThreads}, stream, view,
         projection, weights, is_packed);
}

void clones_wait(const CloneView& view, int64_t projection, cudaStream_t stream) {
  require_view(view, projection);
  launch("clones_wait", wait_kernel, {.threads = kThreads}, stream, view, projection);
}

void clones_reserve_grads(const CloneView& view, int64_t projection, cudaStream_t stream) {
  require_view(view, projection);
  launch("clones_reserve_grads", reserve_kernel, {.threads = kThreads}, stream, view, projection);
}

void clones_offer_grads(const CloneView& view, int64_t projection, cudaStream_t stream) {
  require_view(view, projection);
  launch("clones_offer_grads", offer_kernel, {.threads = kThreads}, stream, view, projection);
}

void clones_collect(const CloneView& view, int64_t projection, float* total, cudaStream_t stream) {
  require_view(view, projection);
  const bool is_packed =
      view.layout.grad_bytes[projection] % 16 == 0 && reinterpret_cast<uintptr_t>(total) % 16 == 0;
  launch("clones_collect", collect_kernel, {.blocks = kBlocks, .threads = kThreads}, stream, view,
         projection, total, is_packed);
}

}  // namespace megacore::cuda
