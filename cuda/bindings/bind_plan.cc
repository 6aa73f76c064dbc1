#include <cstdint>
#include <string>

#include "bindings.h"
#include "megacore/cuda/plan_offload.h"

namespace py = pybind11;

namespace megacore::bindings {

void bind_plan(py::module_& module) {
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
}

}  // namespace megacore::bindings
