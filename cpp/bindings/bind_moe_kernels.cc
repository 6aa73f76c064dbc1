#include <cstdint>

#include "bindings.h"
#include "megacore/base/check.h"
#include "megacore/moe/echo_counts.h"
#include "megacore/moe/grouped_arguments.h"
#include "megacore/moe/grouped_gemm.h"
#include "megacore/moe/reroute.h"

namespace py = pybind11;

namespace megacore::bindings {
namespace {

void bind_grouped_arguments(py::module_& module) {
  module.def("grouped_arguments_bytes", &moe::grouped_arguments_bytes, py::kw_only(),
             py::arg("num_experts"));
  def_kernel(
      module, "fill_grouped_arguments",
      [](int32_t product, uintptr_t m_splits, uintptr_t accumulate_mask, bool accumulate,
         int64_t num_rows, int64_t num_experts, int64_t out_features, int64_t in_features,
         int64_t operand_bytes, int64_t result_bytes, uint64_t a, uint64_t b, uint64_t d,
         uintptr_t arguments, uintptr_t first_row, uint64_t a_scale, uint64_t b_scale) {
        MC_REQUIRE(product >= 0 && product <= 2, "product must be 0, 1 or 2, got {}", product);
        moe::fill_grouped_arguments(
            {.product = static_cast<moe::GroupedProduct>(product),
             .num_rows = num_rows,
             .num_experts = num_experts,
             .out_features = out_features,
             .in_features = in_features,
             .operand_bytes = operand_bytes,
             .result_bytes = result_bytes},
            pointer<const int64_t>(m_splits), pointer<const int64_t>(first_row),
            pointer<const uint8_t>(accumulate_mask), accumulate,
            {.a = a, .b = b, .d = d, .a_scale = a_scale, .b_scale = b_scale},
            moe::grouped_arguments_at(pointer<void>(arguments), num_experts));
      },
      "product", "m_splits", "accumulate_mask", "accumulate", "num_rows", "num_experts",
      "out_features", "in_features", "operand_bytes", "result_bytes", "a", "b", "d", "arguments",
      py::arg("first_row") = 0, py::arg("a_scale") = 0, py::arg("b_scale") = 0);
}

void bind_echo_counts(py::module_& module) {
  def_kernel(
      module, "count_plan",
      [](uintptr_t sums, uintptr_t slot_expert, uintptr_t rerouted, uintptr_t load_before,
         uintptr_t summary, uintptr_t elapsed_ns, uintptr_t copies_of_place, uintptr_t copies,
         int64_t num_ranks, int64_t num_experts, int64_t num_slots) {
        moe::count_plan(
            {.num_ranks = num_ranks, .num_experts = num_experts, .num_spare_slots = num_slots},
            {.load_before = pointer<const int64_t>(load_before),
             .rerouted = pointer<const int64_t>(rerouted),
             .summary = pointer<const int64_t>(summary),
             .elapsed_ns = pointer<const int64_t>(elapsed_ns)},
            pointer<const int64_t>(slot_expert), pointer<const int64_t>(copies_of_place),
            pointer<int64_t>(copies), pointer<double>(sums));
      },
      "sums", "slot_expert", "rerouted", "load_before", "summary", "elapsed_ns", "copies_of_place",
      "copies", "num_ranks", "num_experts", "num_slots");
  def_kernel(
      module, "count_held",
      [](uintptr_t sums, uintptr_t slot_expert, int64_t numel, int64_t first, int64_t end,
         int64_t num_bytes) {
        moe::count_held(pointer<const int64_t>(slot_expert), numel, first, end, num_bytes,
                        pointer<double>(sums));
      },
      "sums", "slot_expert", "numel", "first", "end", "num_bytes");
}

void bind_reroute(py::module_& module) {
  def_kernel(
      module, "reroute",
      [](uintptr_t expert_of, int64_t numel, int64_t num_ranks, int64_t num_experts,
         int64_t num_spare_slots, uintptr_t total, uintptr_t first, uintptr_t slot_expert,
         uintptr_t tokens, uintptr_t place_of) {
        moe::reroute_copies(pointer<const int64_t>(expert_of), numel,
                            {.shape = {.num_ranks = num_ranks,
                                       .num_experts = num_experts,
                                       .num_spare_slots = num_spare_slots},
                             .total = pointer<const int64_t>(total),
                             .first = pointer<const int64_t>(first),
                             .slot_expert = pointer<const int64_t>(slot_expert),
                             .tokens = pointer<const int64_t>(tokens)},
                            pointer<int64_t>(place_of));
      },
      "expert_of", "numel", "num_ranks", "num_experts", "num_spare_slots", "total", "first",
      "slot_expert", "tokens", "place_of");
}

}  // namespace

void bind_moe_kernels(py::module_& module) {
  module.def("is_faster_than_mkl", &moe::is_faster_than_mkl);
  bind_grouped_arguments(module);
  bind_echo_counts(module);
  bind_reroute(module);
}

}  // namespace megacore::bindings
