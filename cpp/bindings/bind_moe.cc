#include <pybind11/numpy.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bindings.h"
#include "megacore/moe/offload_plan.h"

namespace py = pybind11;

namespace megacore::bindings {
namespace {

using moe::OffloadPlan;
using CountArray = py::array_t<int64_t, py::array::c_style>;

moe::TokenCounts view(const CountArray& counts) {
  return {.tokens = counts.data(), .num_ranks = counts.shape(0), .num_experts = counts.shape(1)};
}

// A read-only array on the plan's own memory; it keeps the plan alive.
py::array_t<int64_t> share(const py::object& plan,
                           const std::vector<int64_t>& values,
                           const std::vector<int64_t>& shape) {
  py::array_t<int64_t> array(shape, values.data(), plan);
  array.attr("setflags")(py::arg("write") = false);
  return array;
}

}  // namespace

void bind_moe(py::module_& module) {
  py::class_<OffloadPlan>(module, "OffloadPlan")
      .def_readonly("num_experts", &OffloadPlan::num_experts)
      .def_readonly("max_load", &OffloadPlan::max_load)
      .def_readonly("num_clones", &OffloadPlan::num_clones)
      .def_readonly("bound", &OffloadPlan::bound)
      .def_readonly("bound_holds", &OffloadPlan::bound_holds)
      .def_property_readonly("slot_expert",
                             [](const py::object& self) {
                               const auto& plan = self.cast<const OffloadPlan&>();
                               return share(self, plan.slot_expert,
                                            {plan.num_ranks, plan.num_spare_slots});
                             })
      .def_property_readonly("rerouted",
                             [](const py::object& self) {
                               const auto& plan = self.cast<const OffloadPlan&>();
                               return share(self, plan.rerouted,
                                            {plan.num_ranks, plan.num_ranks, plan.num_spare_slots});
                             })
      .def_property_readonly("load_before",
                             [](const py::object& self) {
                               const auto& plan = self.cast<const OffloadPlan&>();
                               return share(self, plan.load_before, {plan.num_ranks});
                             })
      .def_property_readonly("load_after", [](const py::object& self) {
        const auto& plan = self.cast<const OffloadPlan&>();
        return share(self, plan.load_after, {plan.num_ranks});
      });
  module.attr("DEFAULT_TOLERANCE") = static_cast<double>(moe::PlanSpec{}.tolerance_per_million) /
                                     static_cast<double>(moe::kMillion);
  module.def(
      "plan_offload",
      [](const CountArray& counts, const std::string& planner, int64_t num_spare_slots,
         int64_t tolerance_per_million, int64_t min_imbalance_per_million, int64_t domain_size) {
        const moe::TokenCounts matrix = view(counts);
        const py::gil_scoped_release release;
        return moe::plan_offload(matrix, {.method = moe::plan_method(planner),
                                          .num_spare_slots = num_spare_slots,
                                          .tolerance_per_million = tolerance_per_million,
                                          .min_imbalance_per_million = min_imbalance_per_million,
                                          .domain_size = domain_size});
      },
      py::arg("counts"), py::kw_only(), py::arg("planner"), py::arg("num_spare_slots"),
      py::arg("tolerance_per_million"), py::arg("min_imbalance_per_million"),
      py::arg("domain_size"));
}

}  // namespace megacore::bindings
