#include <pybind11/stl.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "bindings.h"
#include "megacore/base/check.h"
#include "megacore/cuda/peer_exchange.h"

namespace py = pybind11;

namespace megacore::bindings {
namespace {

using cuda::PeerCopies;
using cuda::PeerTensor;
using cuda::PeerView;
using moe::PeerShape;

// What all calls say of the members, in the order of the arguments below.
PeerView view_of(uintptr_t memory,
                 uintptr_t state,
                 int64_t num_members,
                 int64_t position,
                 const std::vector<int64_t>& layout,
                 double timeout_s) {
  MC_REQUIRE(layout.size() == 3, "a layout is three sizes, not {}", layout.size());
  return {.memory = device_pointer<std::byte* const>(memory),
          .state = device_pointer<cuda::PeerState>(state),
          .position = position,
          .layout = {.num_members = num_members,
                     .max_experts = layout[0],
                     .max_capacity = layout[1],
                     .max_row_bytes = layout[2]},
          .timeout_ns = static_cast<int64_t>(timeout_s * 1e9)};
}

// Experts, parts, the part of this member, capacity.
PeerShape shape_of(const PeerView& peers, const std::vector<int64_t>& shape) {
  MC_REQUIRE(shape.size() == 4, "a shape is four numbers, not {}", shape.size());
  return {.num_members = peers.layout.num_members,
          .position = peers.position,
          .num_experts = shape[0],
          .num_parts = shape[1],
          .part = shape[2],
          .capacity = shape[3]};
}

// Tokens, choices, repeats, capacity.
PeerCopies copies_of(uintptr_t row_map, const std::vector<int64_t>& sizes) {
  MC_REQUIRE(sizes.size() == 4, "copies have four sizes, not {}", sizes.size());
  return {.rows = device_pointer<const int64_t>(row_map),
          .num_tokens = sizes[0],
          .num_choices = sizes[1],
          .repeats = sizes[2],
          .capacity = sizes[3]};
}

PeerTensor tensor_of(uintptr_t rows, uintptr_t probs, int64_t width, std::string_view dtype) {
  return {.rows = device_pointer<void>(rows),
          .probs = device_pointer<float>(probs),
          .width = width,
          .type = float_type(dtype)};
}

using Sizes = std::vector<int64_t>;

// Defines a call that takes what describes the members, arguments of its own, whose keywords are
// `names`, and a stream.
template <typename... Own, typename... Names>
void define(py::module_& module,
            const char* name,
            void (*call)(const PeerView&, cudaStream_t, Own...),
            const Names&... names) {
  def_kernel(
      module, name,
      [call](uintptr_t memory, uintptr_t state, int64_t num_members, int64_t position,
             const Sizes& layout, double timeout_s, Own... own, uintptr_t stream) {
        call(view_of(memory, state, num_members, position, layout, timeout_s),
             stream_handle(stream), own...);
      },
      "memory", "state", "num_members", "position", "layout", "timeout_s", names..., "stream");
}

void bind_counts(py::module_& module) {
  define(
      module, "peer_send_counts",
      +[](const PeerView& peers, cudaStream_t stream, const Sizes& shape, uintptr_t experts,
          int64_t num_tokens, int64_t num_choices, uintptr_t workspace) {
        cuda::peer_send_counts(peers, shape_of(peers, shape),
                               {.experts = device_pointer<const int64_t>(experts),
                                .num_tokens = num_tokens,
                                .num_choices = num_choices,
                                .workspace = device_pointer<int32_t>(workspace)},
                               stream);
      },
      "shape", "experts", "num_tokens", "num_choices", "workspace");
  define(
      module, "peer_send_sums",
      +[](const PeerView& peers, cudaStream_t stream, const Sizes& shape, uintptr_t counts) {
        cuda::peer_send_sums(peers, shape_of(peers, shape), device_pointer<const int64_t>(counts),
                             stream);
      },
      "shape", "counts");
  define(
      module, "peer_plan",
      +[](const PeerView& peers, cudaStream_t stream, const Sizes& shape, int64_t num_copies,
          uintptr_t shift, uintptr_t kept, uintptr_t m_splits, uintptr_t totals) {
        cuda::peer_plan(peers, shape_of(peers, shape),
                        {.num_copies = num_copies,
                         .shift = device_pointer<int64_t>(shift),
                         .kept = device_pointer<int64_t>(kept),
                         .m_splits = device_pointer<int64_t>(m_splits),
                         .totals = device_pointer<int64_t>(totals)},
                        stream);
      },
      "shape", "num_copies", "shift", "kept", "m_splits", "totals");
}

void bind_map(py::module_& module) {
  module.def("peer_sort_numel", &cuda::peer_sort_numel, py::kw_only(), py::arg("num_tokens"),
             py::arg("num_choices"), py::arg("num_experts"));
  def_kernel(
      module, "peer_map_copies",
      [](uintptr_t experts, int64_t num_tokens, int64_t num_choices, uintptr_t sorted,
         uintptr_t workspace, uintptr_t shift, uintptr_t members, int64_t num_experts,
         int64_t num_parts, int64_t repeats, int64_t capacity, uintptr_t row_map,
         uintptr_t stream) {
        cuda::peer_map_copies({.experts = device_pointer<const int64_t>(experts),
                               .shift = device_pointer<const int64_t>(shift),
                               .members = device_pointer<const int64_t>(members),
                               .num_tokens = num_tokens,
                               .num_choices = num_choices,
                               .num_experts = num_experts,
                               .num_parts = num_parts,
                               .repeats = repeats,
                               .capacity = capacity},
                              device_pointer<int64_t>(sorted), device_pointer<int32_t>(workspace),
                              device_pointer<int64_t>(row_map), stream_handle(stream));
      },
      "experts", "num_tokens", "num_choices", "sorted", "workspace", "shift", "members",
      "num_experts", "num_parts", "repeats", "capacity", "row_map", "stream");
}

// The way of rows that belong to this member's tokens: what they are, then where their copies lie.
template <auto kCall>
void bind_tokens_side(py::module_& module, const char* name) {
  define(
      module, name,
      +[](const PeerView& peers, cudaStream_t stream, int64_t slot, uintptr_t rows, uintptr_t probs,
          int64_t width, std::string_view dtype, uintptr_t row_map, const Sizes& sizes) {
        kCall(peers, slot, tensor_of(rows, probs, width, dtype), copies_of(row_map, sizes), stream);
      },
      "slot", "rows", "probs", "width", "dtype", "row_map", "sizes");
}

// The way of the rows of this member's experts.
template <auto kCall>
void bind_experts_side(py::module_& module, const char* name) {
  define(
      module, name,
      +[](const PeerView& peers, cudaStream_t stream, int64_t slot, uintptr_t rows, uintptr_t probs,
          int64_t width, std::string_view dtype, uintptr_t num_arrived, int64_t capacity) {
        kCall(peers, slot, tensor_of(rows, probs, width, dtype),
              device_pointer<const int64_t>(num_arrived), capacity, stream);
      },
      "slot", "rows", "probs", "width", "dtype", "num_arrived", "capacity");
}

}  // namespace

void bind_peers(py::module_& module) {
  module.attr("PEER_STATE_NUMEL") =
      static_cast<int64_t>((sizeof(cuda::PeerState) + sizeof(int64_t) - 1) / sizeof(int64_t));
  bind_counts(module);
  bind_map(module);
  bind_tokens_side<&cuda::peer_start_push>(module, "peer_start_push");
  bind_experts_side<&cuda::peer_finish_push>(module, "peer_finish_push");
  define(
      module, "peer_reserve_pull",
      +[](const PeerView& peers, cudaStream_t stream, int64_t slot) {
        cuda::peer_reserve_pull(peers, slot, stream);
      },
      "slot");
  bind_experts_side<&cuda::peer_start_pull>(module, "peer_start_pull");
  bind_tokens_side<&cuda::peer_finish_pull>(module, "peer_finish_pull");
}

}  // namespace megacore::bindings
