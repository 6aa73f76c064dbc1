#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <utility>

#include "bindings.h"
#include "megacore/base/check.h"
#include "megacore/parallel/axis_order.h"
#include "megacore/parallel/host_comm.h"
#include "megacore/parallel/host_window.h"
#include "megacore/parallel/rank_generator.h"
#include "megacore/parallel/topology.h"

namespace py = pybind11;

namespace megacore::bindings {
namespace {

using parallel::AxisSize;
using parallel::HostComm;
using parallel::HostDtype;
using parallel::HostReduction;
using parallel::HostSegment;
using parallel::HostWindow;
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
      .def(py::init(&make_rank_generator), py::kw_only(), py::arg("sizes"), py::arg("order"),
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

std::unique_ptr<HostComm> make_host_comm(std::optional<std::pair<int64_t, int>> segment,
                                         int position,
                                         std::vector<int> ranks,
                                         int64_t slot_bytes,
                                         double timeout_s) {
  const int64_t bytes = HostComm::segment_bytes(static_cast<int64_t>(ranks.size()), slot_bytes);
  // Signal handlers of Python run between bytecodes; without this Ctrl-C would wait for the peers.
  const auto run_signal_handlers = [] {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
  };
  return std::make_unique<HostComm>(segment
                                        ? HostSegment::open(segment->first, segment->second, bytes)
                                        : HostSegment::create(bytes),
                                    parallel::HostCommConfig{.position = position,
                                                             .ranks = std::move(ranks),
                                                             .slot_bytes = slot_bytes,
                                                             .timeout_s = timeout_s,
                                                             .while_waiting = run_signal_handlers});
}

void bind_host_enums(py::module_& module) {
  py::native_enum<HostDtype>(module, "HostDtype", "enum.IntEnum")
      .value("FLOAT32", HostDtype::kFloat32)
      .value("FLOAT64", HostDtype::kFloat64)
      .value("BFLOAT16", HostDtype::kBFloat16)
      .value("FLOAT16", HostDtype::kFloat16)
      .value("INT64", HostDtype::kInt64)
      .value("INT32", HostDtype::kInt32)
      .value("INT16", HostDtype::kInt16)
      .value("INT8", HostDtype::kInt8)
      .value("UINT8", HostDtype::kUInt8)
      .value("BOOL", HostDtype::kBool)
      .finalize();
  py::native_enum<HostReduction>(module, "HostReduction", "enum.IntEnum")
      .value("SUM", HostReduction::kSum)
      .value("MAX", HostReduction::kMax)
      .value("AVG", HostReduction::kAvg)
      .finalize();
}

void bind_host_comm(py::module_& module) {
  using no_gil = py::call_guard<py::gil_scoped_release>;
  module.def(
      "reduce_parts",
      [](const std::vector<uintptr_t>& parts, int64_t numel, HostDtype dtype, HostReduction op,
         uintptr_t output, HostDtype output_dtype) {
        std::vector<const std::byte*> pointers;
        for (const uintptr_t part : parts) {
          pointers.push_back(pointer<const std::byte>(part));
        }
        const py::gil_scoped_release release;
        parallel::reduce_parts({.parts = pointers,
                                .numel = numel,
                                .dtype = dtype,
                                .reduction = op,
                                .output = pointer<std::byte>(output),
                                .output_dtype = output_dtype});
      },
      py::kw_only(), py::arg("parts"), py::arg("numel"), py::arg("dtype"), py::arg("op"),
      py::arg("output"), py::arg("output_dtype"));
  py::class_<HostComm>(module, "HostComm")
      .def(py::init(&make_host_comm), py::kw_only(), py::arg("segment"), py::arg("position"),
           py::arg("ranks"), py::arg("slot_bytes"), py::arg("timeout_s"), no_gil())
      .def_static("segment_bytes", &HostComm::segment_bytes, py::arg("num_members"),
                  py::arg("slot_bytes"))
      .def_static("can_reduce", &parallel::can_reduce, py::arg("dtype"), py::arg("output_dtype"))
      .def_property_readonly("position", &HostComm::position)
      .def_property_readonly("size", &HostComm::size)
      .def_property_readonly("slot_bytes", &HostComm::slot_bytes)
      .def_property_readonly("timeout_s", &HostComm::timeout_s)
      .def_property_readonly("file", [](HostComm& self) { return self.segment().file(); })
      .def("close_file", [](HostComm& self) { self.segment().close_file(); })
      .def("barrier", &HostComm::barrier, no_gil())
      .def(
          "all_reduce",
          [](HostComm& self, uintptr_t data, int64_t numel, HostDtype dtype, HostReduction op) {
            self.all_reduce(pointer<std::byte>(data), numel, dtype, op);
          },
          py::kw_only(), py::arg("data"), py::arg("numel"), py::arg("dtype"), py::arg("op"),
          no_gil())
      .def(
          "reduce_scatter",
          [](HostComm& self, uintptr_t output, HostDtype output_dtype, uintptr_t input,
             HostDtype dtype, int64_t numel, HostReduction op) {
            self.reduce_scatter({.output = pointer<std::byte>(output),
                                 .output_dtype = output_dtype,
                                 .input = pointer<std::byte>(input),
                                 .dtype = dtype,
                                 .numel = numel,
                                 .reduction = op});
          },
          py::kw_only(), py::arg("output"), py::arg("output_dtype"), py::arg("input"),
          py::arg("dtype"), py::arg("numel"), py::arg("op"), no_gil())
      .def(
          "all_gather",
          [](HostComm& self, uintptr_t output, uintptr_t input, int64_t numel, HostDtype dtype) {
            self.all_gather(pointer<std::byte>(output), pointer<std::byte>(input), numel, dtype);
          },
          py::kw_only(), py::arg("output"), py::arg("input"), py::arg("numel"), py::arg("dtype"),
          no_gil())
      .def(
          "broadcast",
          [](HostComm& self, uintptr_t data, int64_t numel, HostDtype dtype, int source) {
            self.broadcast(pointer<std::byte>(data), numel, dtype, source);
          },
          py::kw_only(), py::arg("data"), py::arg("numel"), py::arg("dtype"), py::arg("source"),
          no_gil())
      .def("make_window", &HostComm::make_window, py::kw_only(), py::arg("bytes"),
           py::arg("num_parts"), no_gil());
}

void bind_host_window(py::module_& module) {
  using no_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<HostWindow>(module, "HostWindow")
      .def_property_readonly(
          "data", [](const HostWindow& self) { return reinterpret_cast<uintptr_t>(self.data()); })
      .def_property_readonly("bytes", &HostWindow::bytes)
      .def("offer", &HostWindow::offer, py::arg("part"))
      .def("is_offered", &HostWindow::is_offered, py::arg("part"))
      .def("wait_until_offered", &HostWindow::wait_until_offered, py::arg("part"), no_gil())
      .def("take", &HostWindow::take, py::arg("part"))
      .def("wait_until_taken", &HostWindow::wait_until_taken, py::arg("part"), no_gil())
      .def(
          "data_of",
          [](const HostWindow& self, int position) {
            MC_REQUIRE(position >= 0 && position < self.size(),
                       "position must be in [0, {}), got {}", self.size(), position);
            return reinterpret_cast<uintptr_t>(self.data(position));
          },
          py::arg("position"))
      .def("wait_for_offer_of", &HostWindow::wait_for_offer_of, py::arg("position"), py::kw_only(),
           py::arg("part"), py::arg("round"), py::arg("limit_s"), no_gil())
      .def("take_from", &HostWindow::take_from, py::arg("position"), py::kw_only(), py::arg("part"),
           py::arg("round"))
      .def("wait_for_take_by", &HostWindow::wait_for_take_by, py::arg("position"), py::kw_only(),
           py::arg("part"), py::arg("limit_s"), no_gil())
      .def(
          "reduce_scatter",
          [](HostWindow& self, int64_t part, int64_t offset, int64_t numel, HostDtype dtype,
             HostReduction op) {
            self.reduce_scatter(
                {.part = part, .offset = offset, .numel = numel, .dtype = dtype, .reduction = op});
          },
          py::kw_only(), py::arg("part"), py::arg("offset"), py::arg("numel"), py::arg("dtype"),
          py::arg("op"), no_gil())
      .def(
          "all_gather",
          [](HostWindow& self, int64_t part, int64_t offset, int64_t numel, HostDtype dtype) {
            self.all_gather({.part = part, .offset = offset, .numel = numel, .dtype = dtype});
          },
          py::kw_only(), py::arg("part"), py::arg("offset"), py::arg("numel"), py::arg("dtype"),
          no_gil());
}

}  // namespace

void bind_parallel(py::module_& module) {
  bind_rank_generator(module);
  bind_host_enums(module);
  bind_host_window(module);
  bind_host_comm(module);
  py::class_<Topology>(module, "Topology")
      .def(py::init(&make_topology), py::kw_only(), py::arg("world_size"), py::arg("tp"),
           py::arg("cp"), py::arg("pp"), py::arg("ep"), py::arg("etp"), py::arg("order"))
      .def_readonly("dp", &Topology::dp)
      .def_readonly("etp", &Topology::etp)
      .def_readonly("expert_dp", &Topology::expert_dp)
      .def_readonly("dense", &Topology::dense)
      .def_readonly("expert", &Topology::expert);
}

}  // namespace megacore::bindings
