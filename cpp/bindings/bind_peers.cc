#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "megacore/moe/peer_exchange.h"
#include "megacore/parallel/epochs.h"

namespace py = pybind11;

namespace megacore::bindings {
namespace {

using moe::PeerExchange;
using moe::PeerLayout;
using moe::PeerRows;
using moe::PeerShape;
using parallel::HostDtype;

PeerRows rows_of(uintptr_t rows, uintptr_t probs, int64_t width, HostDtype dtype) {
  return {.rows = pointer<std::byte>(rows),
          .probs = pointer<float>(probs),
          .width = width,
          .dtype = dtype};
}

void bind_peers_values(py::module_& module) {
  using parallel::PeerFault;
  py::native_enum<PeerFault>(module, "PeerFault", "enum.IntEnum")
      .value("NONE", PeerFault::kNone)
      .value("STILL_READS", PeerFault::kStillReads)
      .value("NO_COUNTS", PeerFault::kNoCounts)
      .value("NO_ROWS", PeerFault::kNoRows)
      .value("OTHER_CAPACITY", PeerFault::kOtherCapacity)
      .finalize();
  py::class_<PeerLayout>(module, "PeerLayout")
      .def(py::init([](int64_t num_members, int64_t max_experts, int64_t max_capacity,
                       int64_t max_row_bytes) {
             return PeerLayout{num_members, max_experts, max_capacity, max_row_bytes};
           }),
           py::kw_only(), py::arg("num_members"), py::arg("max_experts"), py::arg("max_capacity"),
           py::arg("max_row_bytes"))
      .def_readonly("num_members", &PeerLayout::num_members)
      .def_readonly("max_experts", &PeerLayout::max_experts)
      .def_readonly("max_capacity", &PeerLayout::max_capacity)
      .def_readonly("max_row_bytes", &PeerLayout::max_row_bytes)
      .def_property_readonly("bytes", &PeerLayout::bytes)
      .def("rows_offset", &PeerLayout::rows_offset, py::arg("slot"));
  py::class_<PeerShape>(module, "PeerShape")
      .def(py::init([](int64_t num_members, int64_t position, int64_t num_experts,
                       int64_t num_parts, int64_t part, int64_t capacity) {
             return PeerShape{num_members, position, num_experts, num_parts, part, capacity};
           }),
           py::kw_only(), py::arg("num_members"), py::arg("position"), py::arg("num_experts"),
           py::arg("num_parts"), py::arg("part"), py::arg("capacity"));
  module.def(
      "peer_failure",
      [](int64_t word) {
        const parallel::PeerFailure failure = parallel::unpacked_failure(word);
        return std::make_tuple(failure.fault, failure.member, failure.epoch);
      },
      py::arg("word"));
  module.def("peer_flags_bytes", &moe::peer_flags_bytes, py::arg("num_members"));
  module.attr("PEER_SLOTS") = moe::kPeerSlots;
  module.attr("PEER_WINDOW_PARTS") = PeerExchange::kWindowParts;
}

void bind_counts(py::class_<PeerExchange>& exchange) {
  def_kernel(
      exchange, "plan_copies",
      [](PeerExchange& self, const PeerShape& shape, uintptr_t experts, uintptr_t members,
         int64_t num_tokens, int64_t num_choices, int64_t repeats, uintptr_t row_map,
         uintptr_t kept, uintptr_t m_splits, uintptr_t totals) {
        std::vector<int64_t> shift(static_cast<size_t>(shape.num_experts));
        self.plan_copies(shape,
                         {.experts = pointer<const int64_t>(experts),
                          .members = pointer<const int64_t>(members),
                          .num_tokens = num_tokens,
                          .num_choices = num_choices,
                          .num_experts = shape.num_experts,
                          .num_parts = shape.num_parts,
                          .repeats = repeats,
                          .capacity = shape.capacity},
                         {.num_copies = num_tokens * num_choices,
                          .shift = shift.data(),
                          .kept = pointer<int64_t>(kept),
                          .m_splits = pointer<int64_t>(m_splits),
                          .totals = pointer<int64_t>(totals)},
                         pointer<int64_t>(row_map));
      },
      "shape", "experts", "members", "num_tokens", "num_choices", "repeats", "row_map", "kept",
      "m_splits", "totals");
}

// Defines a method on a slot and rows; the keywords of what else it takes are `names`.
template <typename... Own, typename... Names>
void def_on_rows(py::class_<PeerExchange>& exchange,
                 const char* name,
                 const char* rows_name,
                 void (*call)(PeerExchange&, int64_t, const PeerRows&, Own...),
                 const Names&... names) {
  def_kernel(
      exchange, name,
      [call](PeerExchange& self, int64_t slot, uintptr_t rows, uintptr_t probs, int64_t width,
             HostDtype dtype,
             Own... own) { call(self, slot, rows_of(rows, probs, width, dtype), own...); },
      "slot", rows_name, "probs", "width", "dtype", names...);
}

// The way of rows that belong to this member's tokens: what they are, then where their copies lie.
template <auto kCall>
void bind_tokens_side(py::class_<PeerExchange>& exchange, const char* name) {
  def_on_rows(
      exchange, name, "tokens",
      +[](PeerExchange& self, int64_t slot, const PeerRows& tokens, uintptr_t row_map,
          int64_t num_tokens, int64_t num_choices, int64_t repeats, int64_t capacity) {
        (self.*kCall)(slot, tokens,
                      {.rows = pointer<const int64_t>(row_map),
                       .num_tokens = num_tokens,
                       .num_choices = num_choices,
                       .repeats = repeats,
                       .capacity = capacity});
      },
      "row_map", "num_tokens", "num_choices", "repeats", "capacity");
}

void bind_exchange(py::module_& module) {
  py::class_<PeerExchange> exchange(module, "PeerExchange");
  exchange.def(py::init<parallel::HostWindow&, const PeerLayout&>(), py::arg("window"),
               py::arg("layout"), py::keep_alive<1, 2>());
  bind_counts(exchange);
  bind_tokens_side<&PeerExchange::start_push>(exchange, "start_push");
  def_on_rows(
      exchange, "finish_push", "rows",
      +[](PeerExchange& self, int64_t slot, const PeerRows& rows, int64_t num_arrived,
          int64_t capacity) { self.finish_push(slot, rows, num_arrived, capacity); },
      "num_arrived", "capacity");
  def_kernel(
      exchange, "reserve_pull",
      [](PeerExchange& self, int64_t slot) {
        return reinterpret_cast<uintptr_t>(self.reserve_pull(slot));
      },
      "slot");
  def_on_rows(
      exchange, "start_pull", "rows",
      +[](PeerExchange& self, int64_t slot, const PeerRows& rows, int64_t num_rows) {
        self.start_pull(slot, rows, num_rows);
      },
      "num_rows");
  bind_tokens_side<&PeerExchange::finish_pull>(exchange, "finish_pull");
}

}  // namespace

void bind_peers(py::module_& module) {
  bind_peers_values(module);
  bind_exchange(module);
}

}  // namespace megacore::bindings
