// Memory of every rank into which other ranks write clones of their experts, and from which they
// read the clones' gradients: layout and access. Shared by the CPU (clone_exchange.h) and by CUDA
// kernels; both read the slot table of a plan in place, without host sync.
//
// Each rank has k slots. A slot has the weights of one expert, one block of bytes for each of its
// two projections, and a block for each of their gradients.

#pragma once

#include <cstdint>

#include "megacore/base/check.h"
#include "megacore/base/host_device.h"

namespace megacore::moe {

inline constexpr int64_t kProjections = 2;
inline constexpr int64_t kBoardAlignment = 256;

enum class ClonePass : int64_t { kWeights, kGrads };

inline void require_projection(int64_t projection) {
  MC_REQUIRE(projection >= 0 && projection < kProjections, "projection must be in [0, {}), got {}",
             kProjections, projection);
}

// Clones by (rank, slot): expert, or -1 for an unused slot. Home rank p has the experts
// [p L, (p + 1) L).
struct CloneTable {
  const int64_t* slot_expert = nullptr;
  int64_t num_ranks = 1;
  int64_t num_slots = 0;    // of a rank
  int64_t num_experts = 1;  // a multiple of num_ranks
  int64_t position = 0;     // of this rank

  MC_HOST_DEVICE int64_t num_local() const { return num_experts / num_ranks; }
  // The local home expert cloned in slot `index` of all slots; -1 if it is not an expert of this
  // rank.
  MC_HOST_DEVICE int64_t my_expert(int64_t index) const {
    const int64_t local = slot_expert[index] - position * num_local();
    return slot_expert[index] >= 0 && local >= 0 && local < num_local() ? local : -1;
  }
  MC_HOST_DEVICE bool is_used_here(int64_t slot) const {
    return slot_expert[position * num_slots + slot] >= 0;
  }
};

// Layout of every rank's memory: flags, then weights, then gradients. Equal on all ranks.
struct CloneLayout {
  int64_t num_slots = 0;
  int64_t weight_bytes[kProjections] = {};  // of one slot
  int64_t grad_bytes[kProjections] = {};

  MC_HOST_DEVICE static int64_t aligned(int64_t bytes) {
    return (bytes + kBoardAlignment - 1) / kBoardAlignment * kBoardAlignment;
  }

  // 32-bit words of flags. Kernels use them, see cuda/kernels/clone_exchange.cu:
  //   counters of this rank    openings of the slots, gradients of each projection
  //   released                 up to which opening the slots may be written
  //   ready, offered, taken    per projection and slot: weights have come, gradients may be read,
  //                            gradients have been read
  //   arrivals                 per pass (weights, gradients), projection and slot of any rank:
  //                            blocks that have finished. A pass has words of its own because
  //                            weights of one microbatch are pushed on another stream while
  //                            gradients of another are collected.
  MC_HOST_DEVICE static int64_t counter_word(int64_t counter) { return counter; }
  MC_HOST_DEVICE static int64_t released_word() { return 1 + kProjections; }
  MC_HOST_DEVICE int64_t ready_word(int64_t projection, int64_t slot) const {
    return slot_words(0) + projection * num_slots + slot;
  }
  MC_HOST_DEVICE int64_t offered_word(int64_t projection, int64_t slot) const {
    return slot_words(1) + projection * num_slots + slot;
  }
  MC_HOST_DEVICE int64_t taken_word(int64_t projection, int64_t slot) const {
    return slot_words(2) + projection * num_slots + slot;
  }
  MC_HOST_DEVICE int64_t arrivals_word(ClonePass pass,
                                       int64_t projection,
                                       int64_t num_ranks,
                                       int64_t index) const {
    const int64_t row = static_cast<int64_t>(pass) * kProjections + projection;
    return slot_words(3) + row * num_ranks * num_slots + index;
  }
  MC_HOST_DEVICE int64_t flag_words(int64_t num_ranks) const {
    return slot_words(3) + 2 * kProjections * num_ranks * num_slots;
  }

  MC_HOST_DEVICE int64_t weights_offset(int64_t num_ranks, int64_t projection) const {
    int64_t offset = aligned(flag_words(num_ranks) * 4);
    for (int64_t before = 0; before < projection; ++before) {
      offset += aligned(num_slots * weight_bytes[before]);
    }
    return offset;
  }
  MC_HOST_DEVICE int64_t grads_offset(int64_t num_ranks, int64_t projection) const {
    int64_t offset = weights_offset(num_ranks, kProjections);
    for (int64_t before = 0; before < projection; ++before) {
      offset += aligned(num_slots * grad_bytes[before]);
    }
    return offset;
  }
  MC_HOST_DEVICE int64_t bytes(int64_t num_ranks) const {
    return grads_offset(num_ranks, kProjections);
  }

 private:
  MC_HOST_DEVICE int64_t slot_words(int64_t kind) const {
    return 2 + kProjections + kind * kProjections * num_slots;
  }
};

}  // namespace megacore::moe
