// Rows into memory of peers and out of it, see megacore/cuda/peer_exchange.h.

#include <cmath>

#include "launch.h"
#include "peer_flags.cuh"

namespace megacore::cuda {
namespace {

// No more blocks than keep a GPU busy: each one acquires the flags and reports.
constexpr int64_t kMostBlocks = 1024;
// Blocks of a kernel that moves rows over a link: with four loads of 16 bytes per thread 1 MB is in
// flight, more than a link of 450 GB/s holds in 2 us, and what other streams compute has the rest.
constexpr int64_t kLinkBlocks = 64;

template <typename Float>
__device__ __forceinline__ Float* rows_of(const PeerView& peers, int64_t slot, int64_t member) {
  return reinterpret_cast<Float*>(data_of(peers, member) + peers.layout.rows_offset(slot));
}
__device__ __forceinline__ float* probs_of(const PeerView& peers, int64_t slot, int64_t member) {
  return reinterpret_cast<float*>(data_of(peers, member) + peers.layout.probs_offset(slot));
}
__device__ __forceinline__ uint32_t* sources_of(const PeerView& peers,
                                                int64_t slot,
                                                int64_t member) {
  return reinterpret_cast<uint32_t*>(data_of(peers, member) + peers.layout.sources_offset(slot));
}

template <typename Float, int kPack>
__device__ __forceinline__ Pack<Float, kPack> filled(float value) {
  Pack<Float, kPack> pack;
#pragma unroll
  for (int n = 0; n < kPack; ++n) {
    narrow(value, pack.values[n]);
  }
  return pack;
}

template <typename Float, int kPack>
__device__ __forceinline__ const Pack<Float, kPack>* packs_at(const Float* rows) {
  return reinterpret_cast<const Pack<Float, kPack>*>(rows);
}

__device__ __forceinline__ int64_t used_rows(const int64_t* num_arrived, int64_t capacity) {
  return *num_arrived < capacity ? *num_arrived : capacity;
}

// The row of a peer that an entry of a map names; a member below 0 for no row.
struct Place {
  int64_t member = -1;
  int64_t row = 0;
};
__device__ __forceinline__ Place place_of(int64_t entry,
                                          const PeerView& peers,
                                          const PeerCopies& copies) {
  const int64_t address = moe::address_of(entry);
  if (address < 0 || address >= peers.layout.num_members * copies.capacity) {
    return {};
  }
  // 32 bits are enough, as the launcher has checked, and divide fast.
  const auto narrow_address = static_cast<uint32_t>(address);
  const auto capacity = static_cast<uint32_t>(copies.capacity);
  return {static_cast<int64_t>(narrow_address / capacity),
          static_cast<int64_t>(narrow_address % capacity)};
}

// Wait that comes before a kernel which moves rows.
struct RowWait {
  bool is_taken;  // else: rows have come
  PeerFault fault;
};
constexpr RowWait kUntilTaken = {true, PeerFault::kStillReads};
constexpr RowWait kUntilFilled = {false, PeerFault::kNoRows};

// Polls in one block, so that a slow peer does not keep other streams' kernels from the SMs. The
// blocks of the kernel behind it find the flags set, or the failure.
__global__ void __launch_bounds__(kRowThreads)
    wait_kernel(PeerView peers, int64_t slot, RowWait wait) {
  const uint32_t epoch = epoch_of(peers, slot) - (wait.is_taken ? 1 : 0);
  wait_for_all(peers, slot, wait.is_taken, epoch, wait.fault);
}

// The launch bound of 1: a block more per processor is not worth a spill.
template <typename Float, int kPack>
__global__ void __launch_bounds__(kRowThreads, 1) start_push_kernel(
    PeerView peers, int64_t slot, PeerTensor tokens, PeerCopies copies, int lanes) {
  const uint32_t epoch = epoch_of(peers, slot);
  if (wait_for_all(peers, slot, true, epoch - 1, PeerFault::kStillReads)) {
    const Team team = team_of(lanes);
    const int64_t vectors = tokens.width / kPack;
    const int64_t per_token = copies.num_choices * copies.repeats;
    for (int64_t token = team.group; token < copies.num_tokens; token += team.num_groups) {
      const Float* from = static_cast<const Float*>(tokens.rows) + token * tokens.width;
      const int64_t first = token * per_token;
      for (int64_t start = team.lane; start < vectors; start += int64_t{kLoadsInFlight} * lanes) {
        Pack<Float, kPack> packs[kLoadsInFlight];
#pragma unroll
        for (int u = 0; u < kLoadsInFlight; ++u) {
          if (start + u * lanes < vectors) {
            packs[u] = load_pack<kPack>(from, start + u * lanes);
          }
        }
        for (int64_t copy = first; copy < first + per_token; ++copy) {
          const Place place = place_of(copies.rows[copy], peers, copies);
          if (place.member < 0 || copies.rows[copy] < 0) {
            continue;
          }
          Float* to = rows_of<Float>(peers, slot, place.member) + place.row * tokens.width;
#pragma unroll
          for (int u = 0; u < kLoadsInFlight; ++u) {
            if (start + u * lanes < vectors) {
              store_pack(to, start + u * lanes, packs[u]);
            }
          }
        }
      }
      for (int64_t copy = first + team.lane; copy < first + per_token; copy += lanes) {
        const Place place = place_of(copies.rows[copy], peers, copies);
        if (place.member < 0) {
          continue;
        }
        sources_of(peers, slot, place.member)[place.row] = static_cast<uint32_t>(
            moe::source_row(copies.rows + first, copy - first, copies.capacity));
        if (tokens.probs != nullptr) {
          probs_of(peers, slot, place.member)[place.row] = tokens.probs[copy / copies.repeats];
        }
      }
    }
  }
  tell_all(peers, slot, false, epoch);
}

// Rows of nobody are not written.
template <typename Float, int kPack>
__global__ void __launch_bounds__(kRowThreads) finish_push_kernel(PeerView peers,
                                                                  int64_t slot,
                                                                  PeerTensor to,
                                                                  const int64_t* num_arrived,
                                                                  int64_t capacity,
                                                                  int lanes) {
  const uint32_t epoch = epoch_of(peers, slot);
  const bool have_come = wait_for_all(peers, slot, false, epoch, PeerFault::kNoRows);
  const int64_t arrived = used_rows(num_arrived, capacity);
  const int64_t vectors = to.width / kPack;
  const uint32_t* source_of = sources_of(peers, slot, peers.position);
  const Float* pushed = rows_of<Float>(peers, slot, peers.position);
  const Team team = team_of(lanes);
  for (int64_t row = team.group; row < arrived; row += team.num_groups) {
    const auto* from =
        packs_at<Float, kPack>(have_come ? pushed + source_of[row] * to.width : nullptr);
    Float* own = static_cast<Float*>(to.rows) + row * to.width;
    for (int64_t start = team.lane; start < vectors; start += int64_t{kLoadsInFlight} * lanes) {
      Pack<Float, kPack> packs[kLoadsInFlight];
#pragma unroll
      for (int u = 0; u < kLoadsInFlight; ++u) {
        if (start + u * lanes < vectors) {
          packs[u] = have_come ? from[start + u * lanes] : filled<Float, kPack>(NAN);
        }
      }
#pragma unroll
      for (int u = 0; u < kLoadsInFlight; ++u) {
        if (start + u * lanes < vectors) {
          store_pack(own, start + u * lanes, packs[u]);
        }
      }
    }
  }
  if (to.probs != nullptr) {
    copy_words(to.probs, probs_of(peers, slot, peers.position), have_come ? arrived : 0);
    fill_words(to.probs, float{NAN}, 0, have_come ? 0 : arrived);
  }
  tell_all(peers, slot, true, epoch);
}

template <typename Float, int kPack>
__global__ void __launch_bounds__(kRowThreads, 1) start_pull_kernel(
    PeerView peers, int64_t slot, PeerTensor from, const int64_t* num_arrived, int64_t capacity) {
  const uint32_t epoch = epoch_of(peers, slot);
  if (wait_for_all(peers, slot, true, epoch - 1, PeerFault::kStillReads)) {
    const int64_t num_rows = used_rows(num_arrived, capacity);
    if (from.rows != nullptr) {  // else they are in the slot already
      auto* to = reinterpret_cast<Pack<Float, kPack>*>(rows_of<Float>(peers, slot, peers.position));
      copy_words(to, packs_at<Float, kPack>(static_cast<const Float*>(from.rows)),
                 num_rows * (from.width / kPack));
    }
    if (from.probs != nullptr) {
      copy_words(probs_of(peers, slot, peers.position), from.probs, num_rows);
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
    for (int64_t start = team.lane; start < vectors; start += int64_t{kLoadsInFlight} * lanes) {
      float sums[kLoadsInFlight][kPack];
#pragma unroll
      for (int n = 0; n < kLoadsInFlight * kPack; ++n) {
        sums[n / kPack][n % kPack] = first_sum;
      }
      for (int64_t copy = 0; have_come && copy < per_token; ++copy) {
        const Place place = place_of(map[copy], peers, copies);
        if (place.member < 0) {
          continue;
        }
        const Float* row = rows_of<Float>(peers, slot, place.member) + place.row * tokens.width;
        Pack<Float, kPack> packs[kLoadsInFlight];
#pragma unroll
        for (int u = 0; u < kLoadsInFlight; ++u) {
          if (start + u * lanes < vectors) {
            packs[u] = load_pack<kPack>(row, start + u * lanes);
          }
        }
#pragma unroll
        for (int n = 0; n < kLoadsInFlight * kPack; ++n) {
          if (start + n / kPack * lanes < vectors) {
            sums[n / kPack][n % kPack] += widen(packs[n / kPack].values[n % kPack]);
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kLoadsInFlight; ++u) {
        if (start + u * lanes < vectors) {
          Pack<Float, kPack> result;
#pragma unroll
          for (int n = 0; n < kPack; ++n) {
            narrow(sums[u][n], result.values[n]);
          }
          store_pack(static_cast<Float*>(tokens.rows) + token * tokens.width, start + u * lanes,
                     result);
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

void require_slot(int64_t slot) {
  MC_REQUIRE(slot >= 0 && slot < moe::kPeerSlots, "slot is {}; there are {}", slot,
             moe::kPeerSlots);
}

void require_rows(const PeerView& peers, int64_t slot, const PeerTensor& rows, int64_t capacity) {
  require_view(peers);
  require_slot(slot);
  MC_REQUIRE(peers.layout.num_members * capacity < int64_t{1} << 32,
             "{} rows of {} members are more than 32 bits count", capacity,
             peers.layout.num_members);
  MC_REQUIRE(capacity >= 0 && capacity <= peers.layout.max_capacity && rows.width >= 0 &&
                 rows.width * bytes_of(rows.type) <= peers.layout.max_row_bytes,
             "{} rows of {} bytes do not fit memory for {} rows of {} bytes", capacity,
             rows.width * bytes_of(rows.type), peers.layout.max_capacity,
             peers.layout.max_row_bytes);
}

// At least one block: also where there is nothing to move, the others wait for the flag.
LaunchShape blocks_for(int64_t rows, int lanes, int64_t most = kMostBlocks) {
  const int64_t wanted = divided_up(rows, kRowThreads / lanes);
  return {.blocks = std::clamp(wanted, int64_t{1}, most), .threads = kRowThreads};
}

// Calls launch.operator()<Float, pack>(lanes).
template <typename Body>
void with_rows(const PeerTensor& rows, const Body& body) {
  with_float_type(rows.type, is_packed(rows.rows), rows.width, [&]<typename Float, int kPack>() {
    body.template operator()<Float, kPack>(lanes_for(std::max(rows.width / kPack, int64_t{1})));
  });
}

void launch_wait(const PeerView& peers, int64_t slot, RowWait wait, cudaStream_t stream) {
  launch("peer_wait", wait_kernel, {.threads = kRowThreads}, stream, peers, slot, wait);
}

// `kernel_of` takes a null pointer to a pack and returns the kernel for such packs.
template <typename KernelOf>
void launch_tokens_side(const char* name,
                        const PeerView& peers,
                        int64_t slot,
                        const PeerTensor& tokens,
                        const PeerCopies& copies,
                        RowWait wait,
                        cudaStream_t stream,
                        const KernelOf& kernel_of) {
  require_rows(peers, slot, tokens, copies.capacity);
  launch_wait(peers, slot, wait, stream);
  with_rows(tokens, [&]<typename Float, int kPack>(int lanes) {
    launch(name, kernel_of(static_cast<Pack<Float, kPack>*>(nullptr)),
           blocks_for(copies.num_tokens, lanes, kLinkBlocks), stream, peers, slot, tokens, copies,
           lanes);
  });
}

}  // namespace

void peer_start_push(const PeerView& peers,
                     int64_t slot,
                     const PeerTensor& tokens,
                     const PeerCopies& copies,
                     cudaStream_t stream) {
  launch_tokens_side("peer_start_push", peers, slot, tokens, copies, kUntilTaken, stream,
                     []<typename Float, int kPack>(Pack<Float, kPack>*) {
                       return start_push_kernel<Float, kPack>;
                     });
}

void peer_finish_push(const PeerView& peers,
                      int64_t slot,
                      const PeerTensor& rows,
                      const int64_t* num_arrived,
                      int64_t capacity,
                      cudaStream_t stream) {
  require_rows(peers, slot, rows, capacity);
  launch_wait(peers, slot, kUntilFilled, stream);
  with_rows(rows, [&]<typename Float, int kPack>(int lanes) {
    launch("peer_finish_push", finish_push_kernel<Float, kPack>, blocks_for(capacity, lanes),
           stream, peers, slot, rows, num_arrived, capacity, lanes);
  });
}

void peer_reserve_pull(const PeerView& peers, int64_t slot, cudaStream_t stream) {
  require_view(peers);
  require_slot(slot);
  launch_wait(peers, slot, kUntilTaken, stream);
}

void peer_start_pull(const PeerView& peers,
                     int64_t slot,
                     const PeerTensor& rows,
                     const int64_t* num_arrived,
                     int64_t capacity,
                     cudaStream_t stream) {
  require_rows(peers, slot, rows, capacity);
  with_rows(rows, [&]<typename Float, int kPack>(int) {
    // As many blocks as packs take, each thread with all its loads in flight; one for a flag alone.
    const int64_t row_packs = rows.rows == nullptr ? 0 : rows.width / kPack;
    const int64_t packs = capacity * (row_packs + (rows.probs == nullptr ? 0 : 1));
    launch("peer_start_pull", start_pull_kernel<Float, kPack>,
           blocks_for(divided_up(packs, kLoadsInFlight), 1, kLinkBlocks), stream, peers, slot, rows,
           num_arrived, capacity);
  });
}

void peer_finish_pull(const PeerView& peers,
                      int64_t slot,
                      const PeerTensor& tokens,
                      const PeerCopies& copies,
                      cudaStream_t stream) {
  launch_tokens_side("peer_finish_pull", peers, slot, tokens, copies, kUntilFilled, stream,
                     []<typename Float, int kPack>(Pack<Float, kPack>*) {
                       return finish_pull_kernel<Float, kPack>;
                     });
}

}  // namespace megacore::cuda
