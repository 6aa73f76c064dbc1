#include "device.h"
#include "gpu_operations.h"
#include "megacore/cuda/peer_exchange.h"
#include "megacore/cuda/permutation.h"

namespace megacore::ops {
namespace {

// What all exchanges take of their members.
struct Members {
  using Arguments = std::tuple<Tensor, Tensor, int64_t, int64_t, int64_t, int64_t, double>;
  Tensor memory;  // (G,) addresses
  Tensor state;
  int64_t position;
  int64_t max_experts;
  int64_t max_capacity;
  int64_t max_row_bytes;
  double timeout_s;

  cuda::PeerView view() const {
    MC_REQUIRE(memory.dim() == 1 && memory.dtype() == kDTypes.int64 && memory.is_contiguous(),
               "memory must be (G,) int64, contiguous, got {}", shape_text(memory));
    constexpr auto kStateBytes = static_cast<int64_t>(sizeof(cuda::PeerState));
    MC_REQUIRE(
        state.dtype() == kDTypes.int64 && state.is_contiguous() && state.numel() * 8 >= kStateBytes,
        "state must have {} bytes of int64, contiguous, got {}", kStateBytes, shape_text(state));
    return {.memory = memory.data<std::byte* const>(),
            .state = state.mutable_data<cuda::PeerState>(),
            .position = position,
            .layout = {.num_members = memory.size(0),
                       .max_experts = max_experts,
                       .max_capacity = max_capacity,
                       .max_row_bytes = max_row_bytes},
            .timeout_ns = static_cast<int64_t>(timeout_s * 1e9)};
  }
};

struct Shape {
  using Arguments = std::tuple<int64_t, int64_t, int64_t, int64_t>;
  int64_t num_experts;
  int64_t num_parts;
  int64_t part;
  int64_t capacity;

  moe::PeerShape of(const cuda::PeerView& peers) const {
    return {.num_members = peers.layout.num_members,
            .position = peers.position,
            .num_experts = num_experts,
            .num_parts = num_parts,
            .part = part,
            .capacity = capacity};
  }
};

void check_experts_of_tokens(const Tensor& experts) {
  MC_REQUIRE(experts.dim() == 2 && experts.dtype() == kDTypes.int64,
             "experts must be (T, k) int64, got {}", shape_text(experts));
}

// Rows, and optionally `numbers` of each.
cuda::PeerTensor tensor_of(const Tensor& rows,
                           const std::optional<Tensor>& probs,
                           int64_t numbers) {
  const int32_t dtype = rows.dtype();
  MC_REQUIRE(dtype == kDTypes.float32 || dtype == kDTypes.bfloat16 || dtype == kDTypes.float16,
             "rows must be float32, bfloat16 or float16 to travel through memory of peers; convert "
             "them, or set moe.static_transport = collective");
  MC_REQUIRE(rows.dim() == 2 && rows.is_contiguous(), "rows must be (M, H), contiguous, got {}",
             shape_text(rows));
  MC_REQUIRE(!probs || (probs->dtype() == kDTypes.float32 && probs->is_contiguous() &&
                        probs->numel() == rows.size(0) * numbers),
             "probs must have {} float32 numbers per row of {}, contiguous, got {}", numbers,
             shape_text(rows), shape_text(*probs));
  return {.rows = rows.mutable_data<void>(),
          .probs = probs ? probs->mutable_data<float>() : nullptr,
          .width = rows.size(1),
          .type = float_type(rows)};
}

Tensor send_counts(Tensor experts, Members members, Shape shape) {
  check_experts_of_tokens(experts);
  const Device device(members.memory, members.state, experts);
  const cuda::PeerView peers = members.view();
  experts = device.contiguous(std::move(experts));
  const int64_t num_tokens = experts.size(0), num_choices = experts.size(1);
  Tensor sorting = device.empty({cuda::peer_sort_numel(num_tokens, num_choices, shape.num_experts)},
                                kDTypes.int32, &experts);
  cuda::peer_send_counts(peers, shape.of(peers),
                         {.experts = experts.data<int64_t>(),
                          .num_tokens = num_tokens,
                          .num_choices = num_choices,
                          .workspace = sorting.mutable_data<int32_t>()},
                         device.stream());
  return sorting;
}

void send_sums(Tensor counts, Members members, Shape shape) {
  check_integers("counts", counts, {shape.num_experts});
  const Device device(members.memory, members.state, counts);
  const cuda::PeerView peers = members.view();
  counts = device.contiguous(std::move(counts));
  cuda::peer_send_sums(peers, shape.of(peers), counts.data<int64_t>(), device.stream());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> plan(Members members, Shape shape, int64_t num_copies) {
  MC_REQUIRE(shape.num_experts >= 0 && shape.num_parts >= 1,
             "there must be at least 0 experts in at least one part, got {} in {}",
             shape.num_experts, shape.num_parts);
  const Device device(members.memory, members.state);
  const cuda::PeerView peers = members.view();
  Tensor shift = device.empty({shape.num_experts}, kDTypes.int64);
  Tensor kept = device.empty({shape.num_experts}, kDTypes.int64);
  Tensor m_splits = device.empty({shape.num_experts / shape.num_parts}, kDTypes.int64);
  Tensor totals = device.empty({3}, kDTypes.int64);
  cuda::peer_plan(peers, shape.of(peers),
                  {.num_copies = num_copies,
                   .shift = shift.mutable_data<int64_t>(),
                   .kept = kept.mutable_data<int64_t>(),
                   .m_splits = m_splits.mutable_data<int64_t>(),
                   .totals = totals.mutable_data<int64_t>()},
                  device.stream());
  return {std::move(shift), std::move(kept), std::move(m_splits), std::move(totals)};
}

Tensor map_copies(Tensor experts, Tensor sorting, Tensor shift, Tensor members, int64_t capacity) {
  check_experts_of_tokens(experts);
  MC_REQUIRE(shift.dim() == 1 && shift.dtype() == kDTypes.int64 && members.dim() == 2 &&
                 members.dtype() == kDTypes.int64,
             "shift must be (E,) and members (P, r), int64, got {} and {}", shape_text(shift),
             shape_text(members));
  const Device device(experts, sorting, shift, members);
  experts = device.contiguous(std::move(experts));
  shift = device.contiguous(std::move(shift));
  members = device.contiguous(std::move(members));
  const moe::PeerRouting routing = {.experts = experts.data<int64_t>(),
                                    .shift = shift.data<int64_t>(),
                                    .members = members.data<int64_t>(),
                                    .num_tokens = experts.size(0),
                                    .num_choices = experts.size(1),
                                    .num_experts = shift.size(0),
                                    .num_parts = members.size(0),
                                    .repeats = members.size(1),
                                    .capacity = capacity};
  const int64_t num_copies = experts.numel();
  const bool sorts = routing.num_experts <= cuda::kMaxSortedExperts;
  MC_REQUIRE(
      sorting.is_contiguous() && sorting.dtype() == (sorts ? kDTypes.int32 : kDTypes.int64) &&
          sorting.numel() == (sorts ? cuda::peer_sort_numel(routing.num_tokens, routing.num_choices,
                                                            routing.num_experts)
                                    : num_copies),
      "sorting must come from peer_send_counts of the same experts, got {}", shape_text(sorting));
  Tensor row_map =
      device.empty({routing.num_tokens, routing.num_choices * routing.repeats}, kDTypes.int64);
  Tensor sorted = sorts ? device.empty_like(experts) : other_owner_of(sorting);
  cuda::peer_map_copies(routing, sorted.mutable_data<int64_t>(),
                        sorts ? sorting.mutable_data<int32_t>() : nullptr,
                        row_map.mutable_data<int64_t>(), device.stream());
  return row_map;
}

// The way of rows that belong to this member's tokens.
template <auto kCall>
void tokens_side(Tensor rows,
                 std::optional<Tensor> probs,
                 Tensor row_map,
                 Members members,
                 int64_t slot,
                 int64_t num_choices,
                 int64_t capacity) {
  const Device device(members.memory, members.state, rows, probs, row_map);
  const cuda::PeerTensor tokens = tensor_of(rows, probs, num_choices);
  MC_REQUIRE(row_map.dim() == 2 && row_map.dtype() == kDTypes.int64 && row_map.is_contiguous() &&
                 row_map.size(0) == rows.size(0) &&
                 (num_choices < 1 || row_map.size(1) % num_choices == 0),
             "row_map must be ({}, {} r) int64, contiguous, got {}", rows.size(0), num_choices,
             shape_text(row_map));
  kCall(members.view(), slot, tokens,
        {.rows = row_map.data<int64_t>(),
         .num_tokens = row_map.size(0),
         .num_choices = num_choices,
         .repeats = num_choices > 0 ? row_map.size(1) / num_choices : 1,
         .capacity = capacity},
        device.stream());
}

// The way of the rows of this member's experts.
template <auto kCall>
void experts_side(const Tensor& rows,
                  const std::optional<Tensor>& probs,
                  const Tensor& num_arrived,
                  const Members& members,
                  int64_t slot,
                  bool are_there) {
  const Device device(members.memory, members.state, rows, probs, num_arrived);
  check_scalar("num_arrived", num_arrived);
  cuda::PeerTensor tensor = tensor_of(rows, probs, 1);
  tensor.rows = are_there ? nullptr : tensor.rows;
  kCall(members.view(), slot, tensor, num_arrived.data<int64_t>(), rows.size(0), device.stream());
}

void finish_push(
    Tensor rows, std::optional<Tensor> probs, Tensor num_arrived, Members members, int64_t slot) {
  experts_side<cuda::peer_finish_push>(rows, probs, num_arrived, members, slot, false);
}

void start_pull(Tensor rows,
                std::optional<Tensor> probs,
                Tensor num_arrived,
                Members members,
                int64_t slot,
                bool are_there) {
  experts_side<cuda::peer_start_pull>(rows, probs, num_arrived, members, slot, are_there);
}

void reserve_pull(Members members, int64_t slot) {
  const Device device(members.memory, members.state);
  cuda::peer_reserve_pull(members.view(), slot, device.stream());
}

constexpr Kernel kPeerKernels[] = {
    {"_peer_send_counts", kernel_of<send_counts>},
    {"_peer_send_sums", kernel_of<send_sums>},
    {"_peer_plan", kernel_of<plan>},
    {"_peer_map_copies", kernel_of<map_copies>},
    {"_peer_start_push", kernel_of<tokens_side<cuda::peer_start_push>>},
    {"_peer_finish_push", kernel_of<finish_push>},
    {"_peer_reserve_pull", kernel_of<reserve_pull>},
    {"_peer_start_pull", kernel_of<start_pull>},
    {"_peer_finish_pull", kernel_of<tokens_side<cuda::peer_finish_pull>>},
};

}  // namespace

std::span<const Kernel> peer_kernels() { return kPeerKernels; }

}  // namespace megacore::ops
