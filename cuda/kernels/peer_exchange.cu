// Exchanges of rows through memory of peers, see megacore/cuda/peer_exchange.h.
//
// How memory is handed over. A kernel that writes ends every thread's part by a fence of the whole
// system; the last block to get there then raises the flags with release semantics. A kernel that
// reads begins, in every block, by looking at its own flags with acquire semantics: flags are
// written into the memory of who waits, so that waiting causes no traffic. Data that peers write is
// never read through pointers that the compiler could take for constant memory.

#include <cmath>

#include "launch.h"
#include "megacore/base/check.h"
#include "megacore/cuda/peer_exchange.h"
#include "megacore/parallel/epochs.h"
#include "row_io.cuh"
#include "system_memory.cuh"

namespace megacore::cuda {
namespace {

using parallel::PeerFault;

// Packs that a thread loads before it uses the first.
constexpr int kInFlight = 4;

// Blocks of a kernel: each one waits and reports, so there are no more than keep a GPU busy.
constexpr int64_t kMostBlocks = 1024;
// Experts for which the plan has shared memory.
constexpr int64_t kMostExperts = 2048;

__device__ __forceinline__ uint32_t* flags_of(const PeerView& peers, int64_t member) {
  return reinterpret_cast<uint32_t*>(peers.memory[member]);
}
__device__ __forceinline__ std::byte* data_of(const PeerView& peers, int64_t member) {
  return peers.memory[member] + moe::peer_flags_bytes(peers.layout.num_members);
}
template <typename Float>
__device__ __forceinline__ Float* rows_of(const PeerView& peers, int64_t slot, int64_t member) {
  return reinterpret_cast<Float*>(data_of(peers, member) + peers.layout.rows_offset(slot));
}
__device__ __forceinline__ float* probs_of(const PeerView& peers, int64_t slot, int64_t member) {
  return reinterpret_cast<float*>(data_of(peers, member) + peers.layout.probs_offset(slot));
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

// All threads of all blocks call it when they are done. The last block tells all members, also
// after a failure, so that they blame nobody but who did not come.
__device__ __forceinline__ void tell_all(const PeerView& peers,
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
  if (is_last) {
    const int64_t members = peers.layout.num_members;
    for (int64_t member = threadIdx.x; member < members; member += kRowThreads) {
      store_release(
          flags_of(peers, member) + moe::peer_flag(members, set, is_taken, peers.position), epoch);
    }
  }
}

// ---- counts -------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kRowThreads)
    send_counts_kernel(PeerView peers, moe::PeerShape shape, const int64_t* counts) {
  constexpr int64_t kSet = moe::kMessageFlags;
  const uint32_t epoch = epoch_of(peers, kSet);
  const bool is_free = wait_for_all(peers, kSet, true, epoch - 1, PeerFault::kStillReads);
  const int64_t numel = shape.message_numel();
  for (int64_t i = threadIdx.x; i < shape.num_members * numel; i += kRowThreads) {
    const int64_t member = i / numel;
    const int64_t column = i % numel;
    // Nobody but this member reads its own message in its own memory; the plan always needs it.
    if (is_free || member == shape.position) {
      auto* messages = reinterpret_cast<int64_t*>(data_of(peers, member));
      messages[shape.position * numel + column] =
          column < shape.num_experts ? counts[column] : shape.capacity;
    }
  }
  tell_all(peers, kSet, false, epoch);
}

__global__ void __launch_bounds__(kRowThreads)
    plan_kernel(PeerView peers, moe::PeerShape shape, moe::PeerPlan plan) {
  __shared__ int64_t totals[kMostExperts];
  __shared__ int64_t mine[kMostExperts];  // of them those of this member
  constexpr int64_t kSet = moe::kMessageFlags;
  const uint32_t epoch = epoch_of(peers, kSet);
  bool is_valid = wait_for_all(peers, kSet, false, epoch, PeerFault::kNoCounts);
  const auto* messages = reinterpret_cast<const int64_t*>(data_of(peers, shape.position));
  if (is_valid) {
    const int64_t other = moe::member_of_other_capacity(messages, shape);
    if (other >= 0 && threadIdx.x == 0) {
      fail(peers, PeerFault::kOtherCapacity, other, epoch);
    }
    is_valid = other < 0;
  }
  if (is_valid) {
    for (int64_t e = threadIdx.x; e < shape.num_experts; e += kRowThreads) {
      totals[e] = moe::copies_before(messages, shape, e, shape.num_members);
      mine[e] = messages[shape.position * shape.message_numel() + e];
    }
  }
  __syncthreads();
  for (int64_t e = threadIdx.x; e < shape.num_experts; e += kRowThreads) {
    if (is_valid) {
      int64_t first_of_expert = 0;
      for (int64_t before = e / shape.num_local() * shape.num_local(); before < e; ++before) {
        first_of_expert += totals[before];
      }
      int64_t first_sorted = 0;
      for (int64_t before = 0; before < e; ++before) {
        first_sorted += mine[before];
      }
      moe::plan_expert(messages, shape, e, first_of_expert, first_sorted, plan);
      continue;
    }
    // No copy has a row. None counts as lost to a full buffer either: that is not what happened.
    plan.shift[e] = shape.capacity;
    plan.kept[e] = messages[shape.position * shape.message_numel() + e];
    for (int64_t member = 0; e < shape.num_local() && member < shape.num_members; ++member) {
      plan.arriving[member * shape.num_local() + e] = 0;
    }
  }
  tell_all(peers, kSet, true, epoch);
}

// ---- rows ---------------------------------------------------------------------------------------

template <typename Float, int kPack>
__device__ __forceinline__ Pack<Float, kPack> filled(float value) {
  Pack<Float, kPack> pack;
#pragma unroll
  for (int n = 0; n < kPack; ++n) {
    narrow(value, pack.values[n]);
  }
  return pack;
}

// The row of a peer that an address names; a member below 0 for no row.
struct Place {
  int64_t member = -1;
  int64_t row = 0;
};
__device__ __forceinline__ Place place_of(int64_t address,
                                          const PeerView& peers,
                                          const PeerCopies& copies) {
  if (address < 0 || address >= peers.layout.num_members * copies.capacity) {
    return {};
  }
  // 32 bits are enough, as the launcher has checked, and divide fast.
  const auto narrow_address = static_cast<uint32_t>(address);
  const auto capacity = static_cast<uint32_t>(copies.capacity);
  return {static_cast<int64_t>(narrow_address / capacity),
          static_cast<int64_t>(narrow_address % capacity)};
}

template <typename Float, int kPack>
__global__ void __launch_bounds__(kRowThreads) start_push_kernel(
    PeerView peers, int64_t slot, PeerTensor tokens, PeerCopies copies, int lanes) {
  const uint32_t epoch = epoch_of(peers, slot);
  if (wait_for_all(peers, slot, true, epoch - 1, PeerFault::kStillReads)) {
    const Team team = team_of(lanes);
    const int64_t vectors = tokens.width / kPack;
    const int64_t per_token = copies.num_choices * copies.repeats;
    for (int64_t token = team.group; token < copies.num_tokens; token += team.num_groups) {
      const Float* from = static_cast<const Float*>(tokens.rows) + token * tokens.width;
      const int64_t first = token * per_token;
      for (int64_t start = team.lane; start < vectors; start += int64_t{kInFlight} * lanes) {
        Pack<Float, kPack> packs[kInFlight];
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          if (start + u * lanes < vectors) {
            packs[u] = load_pack<kPack>(from, start + u * lanes);
          }
        }
        for (int64_t copy = first; copy < first + per_token; ++copy) {
          const Place place = place_of(copies.rows[copy], peers, copies);
          if (place.member < 0) {
            continue;
          }
          Float* to = rows_of<Float>(peers, slot, place.member) + place.row * tokens.width;
#pragma unroll
          for (int u = 0; u < kInFlight; ++u) {
            if (start + u * lanes < vectors) {
              store_pack(to, start + u * lanes, packs[u]);
            }
          }
        }
      }
      if (tokens.probs != nullptr) {
        for (int64_t copy = first + team.lane; copy < first + per_token; copy += lanes) {
          const Place place = place_of(copies.rows[copy], peers, copies);
          if (place.member >= 0) {
            probs_of(peers, slot, place.member)[place.row] = tokens.probs[copy / copies.repeats];
          }
        }
      }
    }
  }
  tell_all(peers, slot, false, epoch);
}

template <typename Float, int kPack>
__global__ void __launch_bounds__(kRowThreads) finish_push_kernel(PeerView peers,
                                                                  int64_t slot,
                                                                  PeerTensor to,
                                                                  const int64_t* num_arrived,
                                                                  int64_t capacity,
                                                                  int lanes) {
  const uint32_t epoch = epoch_of(peers, slot);
  const bool have_come = wait_for_all(peers, slot, false, epoch, PeerFault::kNoRows);
  const int64_t arrived = have_come ? *num_arrived : 0;
  const float other = have_come ? 0.0F : NAN;
  const Team team = team_of(lanes);
  const int64_t vectors = to.width / kPack;
  const Float* from = rows_of<Float>(peers, slot, peers.position);
  for (int64_t row = team.group; row < capacity; row += team.num_groups) {
    const int64_t start = row * to.width;
    for (int64_t i = team.lane; i < vectors; i += lanes) {
      store_pack(static_cast<Float*>(to.rows) + start,
                 i,
                 row < arrived ? load_pack<kPack>(from + start, i) : filled<Float, kPack>(other));
    }
    if (to.probs != nullptr && team.lane == 0) {
      to.probs[row] = row < arrived ? probs_of(peers, slot, peers.position)[row] : other;
    }
  }
  tell_all(peers, slot, true, epoch);
}

template <typename Float, int kPack>
__global__ void __launch_bounds__(kRowThreads) start_pull_kernel(PeerView peers,
                                                                 int64_t slot,
                                                                 PeerTensor from,
                                                                 const int64_t* num_arrived,
                                                                 int64_t capacity,
                                                                 int lanes) {
  const uint32_t epoch = epoch_of(peers, slot);
  if (wait_for_all(peers, slot, true, epoch - 1, PeerFault::kStillReads)) {
    const Team team = team_of(lanes);
    const int64_t vectors = from.width / kPack;
    const int64_t num_rows = *num_arrived < capacity ? *num_arrived : capacity;
    Float* to = rows_of<Float>(peers, slot, peers.position);
    for (int64_t row = team.group; row < num_rows; row += team.num_groups) {
      const int64_t start = row * from.width;
      for (int64_t i = team.lane; i < vectors; i += lanes) {
        store_pack(
            to + start, i, load_pack<kPack>(static_cast<const Float*>(from.rows) + start, i));
      }
      if (from.probs != nullptr && team.lane == 0) {
        probs_of(peers, slot, peers.position)[row] = from.probs[row];
      }
    }
  }
  tell_all(peers, slot, false, epoch);
}

template <typename Float, int kPack>
__global__ void __launch_bounds__(kRowThreads) finish_pull_kernel(
    PeerView peers, int64_t slot, PeerTensor tokens, PeerCopies copies, int lanes) {
  const uint32_t epoch = epoch_of(peers, slot);
  const bool have_come = wait_for_all(peers, slot, false, epoch, PeerFault::kNoRows);
  const float first_sum = have_come ? 0.0F : NAN;
  const Team team = team_of(lanes);
  const int64_t vectors = tokens.width / kPack;
  const int64_t per_token = copies.num_choices * copies.repeats;
  for (int64_t token = team.group; token < copies.num_tokens; token += team.num_groups) {
    const int64_t* map = copies.rows + token * per_token;
    for (int64_t start = team.lane; start < vectors; start += int64_t{kInFlight} * lanes) {
      float sums[kInFlight][kPack];
#pragma unroll
      for (int n = 0; n < kInFlight * kPack; ++n) {
        sums[n / kPack][n % kPack] = first_sum;
      }
      for (int64_t copy = 0; have_come && copy < per_token; ++copy) {
        const Place place = place_of(map[copy], peers, copies);
        if (place.member < 0) {
          continue;
        }
        const Float* row = rows_of<Float>(peers, slot, place.member) + place.row * tokens.width;
        Pack<Float, kPack> packs[kInFlight];
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          if (start + u * lanes < vectors) {
            packs[u] = load_pack<kPack>(row, start + u * lanes);
          }
        }
#pragma unroll
        for (int n = 0; n < kInFlight * kPack; ++n) {
          if (start + n / kPack * lanes < vectors) {
            sums[n / kPack][n % kPack] += widen(packs[n / kPack].values[n % kPack]);
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (start + u * lanes < vectors) {
          Pack<Float, kPack> result;
#pragma unroll
          for (int n = 0; n < kPack; ++n) {
            narrow(sums[u][n], result.values[n]);
          }
          store_pack(
              static_cast<Float*>(tokens.rows) + token * tokens.width, start + u * lanes, result);
        }
      }
    }
    if (tokens.probs != nullptr) {
      for (int64_t choice = team.lane; choice < copies.num_choices; choice += lanes) {
        float sum = first_sum;
        for (int64_t i = choice * copies.repeats; i < (choice + 1) * copies.repeats; ++i) {
          const Place place = place_of(map[i], peers, copies);
          if (have_come && place.member >= 0) {
            sum += probs_of(peers, slot, place.member)[place.row];
          }
        }
        tokens.probs[token * copies.num_choices + choice] = sum;
      }
    }
  }
  tell_all(peers, slot, true, epoch);
}

// ---- launchers ----------------------------------------------------------------------------------

void require_view(const PeerView& peers) {
  const int64_t members = peers.layout.num_members;
  MC_REQUIRE(members >= 1 && members < (int64_t{1} << 16) && peers.position >= 0 &&
                 peers.position < members,
             "position ",
             peers.position,
             " is not among ",
             members,
             " members");
  MC_REQUIRE(peers.timeout_ns > 0, "a wait must have a limit, not ", peers.timeout_ns, " ns");
}

void require_shape(const PeerView& peers, const moe::PeerShape& shape) {
  require_view(peers);
  MC_REQUIRE(shape.num_members == peers.layout.num_members && shape.position == peers.position &&
                 shape.num_parts >= 1 && shape.num_experts % shape.num_parts == 0 &&
                 shape.num_experts <= peers.layout.max_experts && shape.num_experts <= kMostExperts,
             shape.num_experts,
             " experts in ",
             shape.num_parts,
             " parts do not fit memory for ",
             peers.layout.max_experts,
             " experts; the kernel knows up to ",
             kMostExperts);
}

void require_rows(const PeerView& peers, int64_t slot, const PeerTensor& rows, int64_t capacity) {
  require_view(peers);
  MC_REQUIRE(peers.layout.num_members * capacity < int64_t{1} << 32,
             capacity,
             " rows of ",
             peers.layout.num_members,
             " members are more than 32 bits count");
  MC_REQUIRE(
      slot >= 0 && slot < moe::kPeerSlots, "slot is ", slot, "; there are ", moe::kPeerSlots);
  MC_REQUIRE(capacity >= 0 && capacity <= peers.layout.max_capacity && rows.width >= 0 &&
                 rows.width * bytes_of(rows.type) <= peers.layout.max_row_bytes,
             capacity,
             " rows of ",
             rows.width * bytes_of(rows.type),
             " bytes do not fit memory for ",
             peers.layout.max_capacity,
             " rows of ",
             peers.layout.max_row_bytes,
             " bytes");
}

// At least one block: also where there is nothing to move, the others wait for the flag.
LaunchShape blocks_for(int64_t rows, int lanes) {
  const int64_t wanted = divided_up(rows, kRowThreads / lanes);
  return {.blocks = std::clamp(wanted, int64_t{1}, kMostBlocks), .threads = kRowThreads};
}

// Calls launch.operator()<Float, pack>(lanes).
template <typename Body>
void with_rows(const PeerTensor& rows, const Body& body) {
  with_float_type(rows.type, is_packed(rows.rows), rows.width, [&]<typename Float, int kPack>() {
    body.template operator()<Float, kPack>(lanes_for(std::max(rows.width / kPack, int64_t{1})));
  });
}

}  // namespace

void peer_send_counts(const PeerView& peers,
                      const moe::PeerShape& shape,
                      const int64_t* counts,
                      cudaStream_t stream) {
  require_shape(peers, shape);
  launch("peer_send_counts",
         send_counts_kernel,
         {.blocks = 1, .threads = kRowThreads},
         stream,
         peers,
         shape,
         counts);
}

void peer_plan(const PeerView& peers,
               const moe::PeerShape& shape,
               const moe::PeerPlan& plan,
               cudaStream_t stream) {
  require_shape(peers, shape);
  launch(
      "peer_plan", plan_kernel, {.blocks = 1, .threads = kRowThreads}, stream, peers, shape, plan);
}

void peer_start_push(const PeerView& peers,
                     int64_t slot,
                     const PeerTensor& tokens,
                     const PeerCopies& copies,
                     cudaStream_t stream) {
  require_rows(peers, slot, tokens, copies.capacity);
  with_rows(tokens, [&]<typename Float, int kPack>(int lanes) {
    launch("peer_start_push",
           start_push_kernel<Float, kPack>,
           blocks_for(copies.num_tokens, lanes),
           stream,
           peers,
           slot,
           tokens,
           copies,
           lanes);
  });
}

void peer_finish_push(const PeerView& peers,
                      int64_t slot,
                      const PeerTensor& rows,
                      const int64_t* num_arrived,
                      int64_t capacity,
                      cudaStream_t stream) {
  require_rows(peers, slot, rows, capacity);
  with_rows(rows, [&]<typename Float, int kPack>(int lanes) {
    launch("peer_finish_push",
           finish_push_kernel<Float, kPack>,
           blocks_for(capacity, lanes),
           stream,
           peers,
           slot,
           rows,
           num_arrived,
           capacity,
           lanes);
  });
}

void peer_start_pull(const PeerView& peers,
                     int64_t slot,
                     const PeerTensor& rows,
                     const int64_t* num_arrived,
                     int64_t capacity,
                     cudaStream_t stream) {
  require_rows(peers, slot, rows, capacity);
  with_rows(rows, [&]<typename Float, int kPack>(int lanes) {
    launch("peer_start_pull",
           start_pull_kernel<Float, kPack>,
           blocks_for(capacity, lanes),
           stream,
           peers,
           slot,
           rows,
           num_arrived,
           capacity,
           lanes);
  });
}

void peer_finish_pull(const PeerView& peers,
                      int64_t slot,
                      const PeerTensor& tokens,
                      const PeerCopies& copies,
                      cudaStream_t stream) {
  require_rows(peers, slot, tokens, copies.capacity);
  with_rows(tokens, [&]<typename Float, int kPack>(int lanes) {
    launch("peer_finish_pull",
           finish_pull_kernel<Float, kPack>,
           blocks_for(copies.num_tokens, lanes),
           stream,
           peers,
           slot,
           tokens,
           copies,
           lanes);
  });
}

}  // namespace megacore::cuda
