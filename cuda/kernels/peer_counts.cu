// Counts of all members and the plan of where rows lie, see megacore/cuda/peer_exchange.h.

#include "launch.h"
#include "peer_flags.cuh"
#include "sort_tiles.cuh"

namespace megacore::cuda {
namespace {

// Experts for which the plan has shared memory.
constexpr int64_t kMostExperts = 2048;

// Writes the messages of this member, by one block.
template <int kThreads, typename Count>
__device__ __forceinline__ void send_counts(const PeerView& peers,
                                            const moe::PeerShape& shape,
                                            const Count* counts,
                                            uint32_t epoch) {
  constexpr int64_t kSet = moe::kMessageFlags;
  const bool is_free = wait_for_all(peers, kSet, true, epoch - 1, PeerFault::kStillReads);
  const int64_t numel = shape.message_numel();
  for (int64_t i = threadIdx.x; i < shape.num_members * numel; i += kThreads) {
    const int64_t member = i / numel;
    const int64_t column = i % numel;
    // Nobody but this member reads its own message in its own memory; the plan always needs it.
    if (is_free || member == shape.position) {
      auto* messages = reinterpret_cast<int64_t*>(data_of(peers, member));
      messages[shape.position * numel + column] =
          column < shape.num_experts ? int64_t{counts[column]} : shape.capacity;
    }
  }
}

__global__ void __launch_bounds__(kRowThreads)
    send_sums_kernel(PeerView peers, moe::PeerShape shape, const int64_t* counts) {
  const uint32_t epoch = epoch_of(peers, moe::kMessageFlags);
  send_counts<kRowThreads>(peers, shape, counts, epoch);
  tell_all(peers, moe::kMessageFlags, false, epoch);
}

// Blocks count their tiles, and the last one sends the sums.
__global__ void __launch_bounds__(sorting::kThreads)
    send_counts_kernel(PeerView peers, moe::PeerShape shape, SortParams sort, int64_t tile) {
  constexpr int64_t kSet = moe::kMessageFlags;
  __shared__ int32_t sums[kMaxSortedExperts];
  const uint32_t epoch = epoch_of(peers, kSet);
  sorting::count_block(sort, tile);
  if (!is_last_block(peers, kSet, false, epoch)) {
    return;
  }
  const int64_t expert = threadIdx.x;
  if (expert < shape.num_experts) {
    const volatile int32_t* counts = sort.workspace + expert;
    int32_t sum = 0;
#pragma unroll 8
    for (unsigned block = 0; block < gridDim.x; ++block) {
      sum += counts[int64_t{block} * shape.num_experts];
    }
    sums[expert] = sum;
  }
  __syncthreads();
  send_counts<sorting::kThreads>(peers, shape, sums, epoch);
  __threadfence_system();
  __syncthreads();
  raise_flags(peers, kSet, false, epoch);
}

__device__ __forceinline__ int64_t sum_of_warp(int64_t value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

// Sums over the threads of the block, which all call it; the result is that of thread 0.
__device__ __forceinline__ moe::PlannedRows sums_of_block(const moe::PlannedRows& mine) {
  __shared__ moe::PlannedRows of_warps[kRowThreads / kWarp];
  const moe::PlannedRows of_warp = {sum_of_warp(mine.wanted), sum_of_warp(mine.kept),
                                    sum_of_warp(mine.arriving)};
  if (threadIdx.x % kWarp == 0) {
    of_warps[threadIdx.x / kWarp] = of_warp;
  }
  __syncthreads();
  moe::PlannedRows all;
  for (int warp = 0; threadIdx.x == 0 && warp < kRowThreads / kWarp; ++warp) {
    all.add(of_warps[warp]);
  }
  return all;
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
  moe::PlannedRows rows;
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
      rows.add(moe::plan_expert(messages, shape, e, first_of_expert, first_sorted, plan));
      continue;
    }
    // No copy has a row. None counts as lost to a full buffer either: that is not what happened.
    const int64_t count = messages[shape.position * shape.message_numel() + e];
    plan.shift[e] = shape.capacity;
    plan.kept[e] = count;
    rows.add({.wanted = count, .kept = count});
    if (e < shape.num_local()) {
      plan.m_splits[e] = 0;
    }
  }
  const moe::PlannedRows all = sums_of_block(rows);
  if (threadIdx.x == 0) {
    moe::write_totals(all, plan);
  }
  tell_all(peers, kSet, true, epoch);
}

// Sorts the tile of a block, then maps the tokens in it.
__global__ void __launch_bounds__(sorting::kThreads, 1)
    sort_and_map_kernel(moe::PeerRouting routing, SortParams sort, int64_t tile, int64_t* map) {
  sorting::place_block(sort, tile);
  __syncthreads();
  const int64_t first = int64_t{blockIdx.x} * tile / routing.num_choices;
  const int64_t end = first + tile / routing.num_choices;
  for (int64_t token = first + threadIdx.x; token < end && token < routing.num_tokens;
       token += sorting::kThreads) {
    moe::map_token(routing, token, map);
  }
}

__global__ void __launch_bounds__(kRowThreads, 1)
    map_kernel(moe::PeerRouting routing, int64_t* map) {
  const int64_t token = int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
  if (token < routing.num_tokens) {
    moe::map_token(routing, token, map);
  }
}

void require_shape(const PeerView& peers, const moe::PeerShape& shape) {
  require_view(peers);
  MC_REQUIRE(shape.num_members == peers.layout.num_members && shape.position == peers.position &&
                 shape.num_parts >= 1 && shape.num_experts % shape.num_parts == 0 &&
                 shape.num_experts <= peers.layout.max_experts && shape.num_experts <= kMostExperts,
             "{} experts in {} parts do not fit memory for {} experts; the kernel knows up to {}",
             shape.num_experts, shape.num_parts, peers.layout.max_experts, kMostExperts);
}

SortParams sort_of(const int64_t* experts, int64_t numel, int64_t num_experts, int32_t* workspace) {
  MC_REQUIRE(numel >= 0 && numel < (int64_t{1} << 31) && num_experts <= kMaxSortedExperts,
             "{} copies for {} experts; the kernel sorts fewer than 2^31 by at most {}", numel,
             num_experts, kMaxSortedExperts);
  return {.expert_of = experts,
          .numel = numel,
          .num_experts = num_experts,
          .row_map = nullptr,
          .tokens_per_expert = nullptr,
          .workspace = workspace};
}

// Tokens without choices are in one tile.
sorting::Tiling tiling_of(int64_t num_tokens, int64_t num_choices) {
  return sorting::tiling_of(num_tokens * num_choices, std::max(int64_t{1}, num_choices));
}

}  // namespace

int64_t peer_sort_numel(int64_t num_tokens, int64_t num_choices, int64_t num_experts) {
  return tiling_of(num_tokens, num_choices).tiles * num_experts;
}

void peer_send_counts(const PeerView& peers,
                      const moe::PeerShape& shape,
                      const PeerChoices& choices,
                      cudaStream_t stream) {
  require_shape(peers, shape);
  const SortParams sort = sort_of(choices.experts, choices.num_tokens * choices.num_choices,
                                  shape.num_experts, choices.workspace);
  const sorting::Tiling tiling = tiling_of(choices.num_tokens, choices.num_choices);
  launch("peer_send_counts", send_counts_kernel,
         {.blocks = tiling.tiles, .threads = sorting::kThreads}, stream, peers, shape, sort,
         tiling.tile);
}

void peer_send_sums(const PeerView& peers,
                    const moe::PeerShape& shape,
                    const int64_t* counts,
                    cudaStream_t stream) {
  require_shape(peers, shape);
  launch("peer_send_sums", send_sums_kernel, {.blocks = 1, .threads = kRowThreads}, stream, peers,
         shape, counts);
}

void peer_plan(const PeerView& peers,
               const moe::PeerShape& shape,
               const moe::PeerPlan& plan,
               cudaStream_t stream) {
  require_shape(peers, shape);
  launch("peer_plan", plan_kernel, {.blocks = 1, .threads = kRowThreads}, stream, peers, shape,
         plan);
}

void peer_map_copies(const moe::PeerRouting& routing,
                     int64_t* sorted,
                     int32_t* workspace,
                     int64_t* map,
                     cudaStream_t stream) {
  MC_REQUIRE(routing.num_tokens >= 0 && routing.num_choices >= 0 && routing.repeats >= 1 &&
                 routing.num_parts >= 1 && routing.num_experts % routing.num_parts == 0,
             "{} experts in {} parts do not fit a map of {} tokens", routing.num_experts,
             routing.num_parts, routing.num_tokens);
  if (routing.num_tokens * routing.num_choices == 0) {
    return;
  }
  moe::PeerRouting found = routing;
  found.sorted = sorted;
  if (workspace == nullptr) {
    launch("peer_map_copies", map_kernel,
           {.blocks = divided_up(routing.num_tokens, kRowThreads), .threads = kRowThreads}, stream,
           found, map);
    return;
  }
  SortParams sort = sort_of(routing.experts, routing.num_tokens * routing.num_choices,
                            routing.num_experts, workspace);
  sort.row_map = sorted;
  const sorting::Tiling tiling = tiling_of(routing.num_tokens, routing.num_choices);
  launch("peer_map_copies", sort_and_map_kernel,
         {.blocks = tiling.tiles, .threads = sorting::kThreads}, stream, found, sort, tiling.tile,
         map);
}

}  // namespace megacore::cuda
