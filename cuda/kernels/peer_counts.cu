// Counts of all members and the plan of where rows lie, see megacore/cuda/peer_exchange.h.

#include "launch.h"
#include "peer_flags.cuh"

namespace megacore::cuda {
namespace {

// Experts for which the plan has shared memory.
constexpr int64_t kMostExperts = 2048;

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

}  // namespace

void peer_send_counts(const PeerView& peers,
                      const moe::PeerShape& shape,
                      const int64_t* counts,
                      cudaStream_t stream) {
  require_shape(peers, shape);
  launch("peer_send_counts", send_counts_kernel, {.blocks = 1, .threads = kRowThreads}, stream,
         peers, shape, counts);
}

void peer_plan(const PeerView& peers,
               const moe::PeerShape& shape,
               const moe::PeerPlan& plan,
               cudaStream_t stream) {
  require_shape(peers, shape);
  launch("peer_plan", plan_kernel, {.blocks = 1, .threads = kRowThreads}, stream, peers, shape,
         plan);
}

void peer_map_copies(const moe::PeerRouting& routing, int64_t* map, cudaStream_t stream) {
  MC_REQUIRE(routing.num_tokens >= 0 && routing.num_choices >= 0 && routing.repeats >= 1 &&
                 routing.num_parts >= 1 && routing.num_experts % routing.num_parts == 0,
             "{} experts in {} parts do not fit a map of {} tokens", routing.num_experts,
             routing.num_parts, routing.num_tokens);
  if (routing.num_tokens > 0) {
    launch("peer_map_copies", map_kernel,
           {.blocks = divided_up(routing.num_tokens, kRowThreads), .threads = kRowThreads}, stream,
           routing, map);
  }
}

}  // namespace megacore::cuda
