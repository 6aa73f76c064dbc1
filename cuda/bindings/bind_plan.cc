#include <cstdint>
#include <string>

#include "bindings.h"
#include "megacore/cuda/echo_counts.h"
#include "megacore/cuda/plan_offload.h"
#include "megacore/cuda/reroute.h"

namespace py = pybind11;

namespace megacore::bindings {

namespace {

void bind_echo_counts(py::module_& module) {
  def_kernel(
      module, "count_plan",
      [](uintptr_t sums, uintptr_t slot_expert, uintptr_t rerouted, uintptr_t load_before,
         uintptr_t summary, uintptr_t elapsed_ns, uintptr_t copies_of_place, uintptr_t copies,
         int64_t num_ranks, int64_t num_experts, int64_t num_slots, uintptr_t stream) {
        cuda::count_plan(
            {.num_ranks = num_ranks, .num_experts = num_experts, .num_spare_slots = num_slots},
            {.load_before = device_pointer<const int64_t>(load_before),
             .rerouted = device_pointer<const int64_t>(rerouted),
             .summary = device_pointer<const int64_t>(summary),
             .elapsed_ns = device_pointer<const int64_t>(elapsed_ns)},
            device_pointer<const int64_t>(slot_expert),
            device_pointer<const int64_t>(copies_of_place), device_pointer<int64_t>(copies),
            device_pointer<double>(sums), stream_handle(stream));
      },
      "sums", "slot_expert", "rerouted", "load_before", "summary", "elapsed_ns", "copies_of_place",
      "copies", "num_ranks", "num_experts", "num_slots", "stream");
  def_kernel(
      module, "count_held",
      [](uintptr_t sums, uintptr_t slot_expert, int64_t numel, int64_t first, int64_t end,
         int64_t num_bytes, uintptr_t stream) {
        cuda::count_held(device_pointer<const int64_t>(slot_expert), numel, first, end, num_bytes,
                         device_pointer<double>(sums), stream_handle(stream));
      },
      "sums", "slot_expert", "numel", "first", "end", "num_bytes", "stream");
}

}  // namespace

void bind_plan(py::module_& module) {
  bind_echo_counts(module);
  def_kernel(
      module, "plan_offload",
      [](uintptr_t counts, int64_t num_ranks, int64_t num_experts, int64_t num_spare_slots,
         const std::string& planner, int64_t tolerance_per_million,
         int64_t min_imbalance_per_million, int64_t domain_size, uintptr_t slot_expert,
         uintptr_t rerouted, uintptr_t load_before, uintptr_t load_after, uintptr_t summary,
         uintptr_t elapsed_ns, uintptr_t stream) {
        cuda::plan_offload({.shape = {.num_ranks = num_ranks,
                                      .num_experts = num_experts,
                                      .num_spare_slots = num_spare_slots},
                            .spec = {.method = moe::plan_method(planner),
                                     .num_spare_slots = num_spare_slots,
                                     .tolerance_per_million = tolerance_per_million,
                                     .min_imbalance_per_million = min_imbalance_per_million,
                                     .domain_size = domain_size},
                            .counts = device_pointer<const int64_t>(counts),
                            .plan = {.slot_expert = device_pointer<int64_t>(slot_expert),
                                     .rerouted = device_pointer<int64_t>(rerouted),
                                     .load_before = device_pointer<int64_t>(load_before),
                                     .load_after = device_pointer<int64_t>(load_after),
                                     .summary = device_pointer<moe::TeamPlanSummary>(summary)},
                            .elapsed_ns = device_pointer<int64_t>(elapsed_ns)},
                           stream_handle(stream));
      },
      "counts", "num_ranks", "num_experts", "num_spare_slots", "planner", "tolerance_per_million",
      "min_imbalance_per_million", "domain_size", "slot_expert", "rerouted", "load_before",
      "load_after", "summary", "elapsed_ns", "stream");
  def_kernel(
      module, "reroute",
      [](uintptr_t expert_of, uintptr_t row_map, uintptr_t counts, int64_t numel, int64_t num_ranks,
         int64_t num_experts, int64_t num_spare_slots, uintptr_t total, uintptr_t first,
         uintptr_t slot_expert, uintptr_t tokens, uintptr_t place_of, uintptr_t stream) {
        cuda::reroute({.expert_of = device_pointer<const int64_t>(expert_of),
                       .row_map = device_pointer<const int64_t>(row_map),
                       .counts = device_pointer<const int64_t>(counts),
                       .numel = numel,
                       .row = {.shape = {.num_ranks = num_ranks,
                                         .num_experts = num_experts,
                                         .num_spare_slots = num_spare_slots},
                               .total = device_pointer<const int64_t>(total),
                               .first = device_pointer<const int64_t>(first),
                               .slot_expert = device_pointer<const int64_t>(slot_expert),
                               .tokens = device_pointer<const int64_t>(tokens)},
                       .place_of = device_pointer<int64_t>(place_of)},
                      stream_handle(stream));
      },
      "expert_of", "row_map", "counts", "numel", "num_ranks", "num_experts", "num_spare_slots",
      "total", "first", "slot_expert", "tokens", "place_of", "stream");
}

}  // namespace megacore::bindings
