#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <utility>

#include "bindings.h"
#include "megacore/parallel/axis_order.h"
#include "megacore/parallel/rank_generator.h"
#include "megacore/parallel/topology.h"

namespace py = pybind11;

namespace megacore::bindings {
namespace {

using parallel::AxisSize;
using parallel::RankGenerator;
using parallel::RankGroups;
using parallel::Topology;
using parallel::TopologyConfig;

// An int32 array (num_groups, group_size) that owns the vector's memory: nothing is copied.
py::array_t<int32_t> to_array(RankGroups groups) {
  auto ranks = std::make_unique<std::vector<int32_t>>(std::move(groups.ranks));
  int32_t* data = ranks->data();
  py::capsule owner(ranks.get(),
                    [](void* memory) { delete static_cast<std::vector<int32_t>*>(memory); });
  static_cast<void>(ranks.release());
  return py::array_t<int32_t>({groups.num_groups, groups.group_size}, data, owner);
}

RankGenerator make_rank_generator(const std::vector<std::pair<std::string, int64_t>>& sizes,
                                  std::string_view order,
                                  int64_t rank_offset) {
  std::vector<AxisSize> axes;
  for (const auto& [axis, size] : sizes) {
    axes.push_back({axis, size});
  }
  return RankGenerator(parallel::arrange(axes, order), rank_offset);
}

std::vector<std::pair<std::string, int64_t>> layout_of(const RankGenerator& ranks) {
  std::vector<std::pair<std::string, int64_t>> layout;
  for (const AxisSize& entry : ranks.layout()) {
    layout.emplace_back(entry.axis, entry.size);
  }
  return layout;
}

void bind_rank_generator(py::module_& module) {
  py::class_<RankGenerator>(module, "RankGenerator")
      .def(py::init(&make_rank_generator),
           py::kw_only(),
           py::arg("sizes"),
           py::arg("order"),
           py::arg("rank_offset"))
      .def_property_readonly("world_size", &RankGenerator::world_size)
      .def_property_readonly("rank_offset", &RankGenerator::rank_offset)
      .def_property_readonly("layout", &layout_of)
      .def("stride", &RankGenerator::stride, py::arg("axis"))
      .def("group_size", &RankGenerator::group_size, py::arg("token"))
      .def(
          "groups",
          [](const RankGenerator& self, std::string_view token) {
            RankGroups groups;
            {
              const py::gil_scoped_release release;
              groups = self.groups(token);
            }
            return to_array(std::move(groups));
          },
          py::arg("token"))
      .def("group_of", &RankGenerator::group_of, py::arg("rank"), py::arg("token"))
      .def("coordinates", &RankGenerator::coordinates, py::arg("rank"))
      .def(
          "rank",
          [](const RankGenerator& self, const std::vector<int64_t>& coordinates) {
            return self.rank(coordinates);
          },
          py::arg("coordinates"));
}

Topology make_topology(int64_t world_size,
                       int64_t tp,
                       int64_t cp,
                       int64_t pp,
                       int64_t ep,
                       std::optional<int64_t> etp,
                       const std::string& order) {
  return parallel::make_topology(TopologyConfig{.world_size = world_size,
                                                .tp = tp,
                                                .cp = cp,
                                                .pp = pp,
                                                .ep = ep,
                                                .etp = etp,
                                                .order = order});
}

}  // namespace

void bind_parallel(py::module_& module) {
  bind_rank_generator(module);
  py::class_<Topology>(module, "Topology")
      .def(py::init(&make_topology),
           py::kw_only(),
           py::arg("world_size"),
           py::arg("tp"),
           py::arg("cp"),
           py::arg("pp"),
           py::arg("ep"),
           py::arg("etp"),
           py::arg("order"))
      .def_readonly("dp", &Topology::dp)
      .def_readonly("etp", &Topology::etp)
      .def_readonly("expert_dp", &Topology::expert_dp)
      .def_readonly("dense", &Topology::dense)
      .def_readonly("expert", &Topology::expert);
}

}  // namespace megacore::bindings
