#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "megacore/buffer/bucket_plan.h"
#include "megacore/buffer/bucket_tracker.h"
#include "megacore/buffer/shard_map.h"

namespace py = pybind11;

namespace megacore::bindings {
namespace {

void bind_buffer_values(py::module_& module) {
  py::class_<buffer::Bucket>(module, "Bucket")
      .def_readonly("start", &buffer::Bucket::start)
      .def_readonly("end", &buffer::Bucket::end)
      .def_readonly("numel_unpadded", &buffer::Bucket::numel_unpadded)
      .def_readonly("param_indices", &buffer::Bucket::param_indices)
      .def_property_readonly("numel", &buffer::Bucket::numel)
      .def("__eq__", [](const buffer::Bucket& a, const buffer::Bucket& b) { return a == b; });
  using buffer::ShardPiece;
  py::class_<ShardPiece>(module, "ShardPiece")
      .def_readonly("param_index", &ShardPiece::param_index)
      .def_readonly("bucket", &ShardPiece::bucket)
      .def_property_readonly("world_start", [](const ShardPiece& p) { return p.world.start; })
      .def_property_readonly("world_end", [](const ShardPiece& p) { return p.world.end; })
      .def_property_readonly("bucket_start",
                             [](const ShardPiece& p) { return p.bucket_range.start; })
      .def_property_readonly("bucket_end", [](const ShardPiece& p) { return p.bucket_range.end; })
      .def_property_readonly("local_start", [](const ShardPiece& p) { return p.local.start; })
      .def_property_readonly("local_end", [](const ShardPiece& p) { return p.local.end; })
      .def_property_readonly("param_start", [](const ShardPiece& p) { return p.param.start; })
      .def_property_readonly("param_end", [](const ShardPiece& p) { return p.param.end; })
      .def_property_readonly("numel", [](const ShardPiece& p) { return p.world.numel(); })
      .def("__eq__", [](const ShardPiece& a, const ShardPiece& b) { return a == b; });
}

void bind_plan(py::module_& module) {
  using buffer::BufferPlan;
  py::class_<BufferPlan>(module, "BufferPlan")
      .def_readonly("numel", &BufferPlan::numel)
      .def_readonly("dp_size", &BufferPlan::dp_size)
      .def_readonly("bucket_numel", &BufferPlan::bucket_numel)
      .def_readonly("param_alignment", &BufferPlan::param_alignment)
      .def_readonly("bucket_alignment", &BufferPlan::bucket_alignment)
      .def_readonly("buckets", &BufferPlan::buckets)
      .def_property_readonly("num_params",
                             [](const BufferPlan& plan) { return plan.param_ranges.size(); })
      .def_property_readonly("shard_numel", &BufferPlan::shard_numel)
      .def(
          "param_range",
          [](const BufferPlan& plan, int64_t index) {
            const buffer::Range& range = plan.param_range(index);
            return std::pair(range.start, range.end);
          },
          py::arg("index"))
      .def("shard", &buffer::shard_pieces, py::arg("dp_rank"))
      .def(
          "shard_range",
          [](const BufferPlan& plan, int64_t bucket, int64_t dp_rank) {
            const buffer::Range range = buffer::shard_range(plan, bucket, dp_rank);
            return std::pair(range.start, range.end);
          },
          py::arg("bucket"), py::kw_only(), py::arg("dp_rank"))
      .def(
          "to_text",
          [](const BufferPlan& plan, std::optional<int64_t> dp_rank) {
            return dp_rank ? buffer::to_text(plan, *dp_rank) : buffer::to_text(plan);
          },
          py::arg("dp_rank") = py::none())
      .def("__repr__", [](const BufferPlan& plan) { return buffer::to_text(plan); })
      .def("__eq__", [](const BufferPlan& a, const BufferPlan& b) { return a == b; });
  module.def(
      "plan_buckets",
      [](std::vector<int64_t> numels, int64_t dp_size, std::optional<int64_t> bucket_numel,
         std::vector<bool> shared, int64_t param_alignment, std::optional<int64_t> bucket_alignment,
         bool pad_for_ring) {
        return buffer::plan_buckets({.numels = std::move(numels),
                                     .dp_size = dp_size,
                                     .bucket_numel = bucket_numel,
                                     .shared = std::move(shared),
                                     .param_alignment = param_alignment,
                                     .bucket_alignment = bucket_alignment,
                                     .pad_for_ring = pad_for_ring});
      },
      py::arg("numels"), py::kw_only(), py::arg("dp_size"), py::arg("bucket_numel"),
      py::arg("shared"), py::arg("param_alignment"), py::arg("bucket_alignment"),
      py::arg("pad_for_ring"), py::call_guard<py::gil_scoped_release>());
}

void bind_tracker(py::module_& module) {
  using buffer::BucketTracker;
  py::class_<BucketTracker>(module, "BucketTracker")
      .def(py::init<std::vector<std::vector<int64_t>>, std::vector<bool>>(), py::arg("buckets"),
           py::arg("waits"))
      .def("start", &BucketTracker::start)
      .def("mark", &BucketTracker::mark, py::arg("param"))
      .def("finish", &BucketTracker::finish)
      .def("is_launched", &BucketTracker::is_launched, py::arg("param"))
      .def("count", &BucketTracker::count, py::arg("param"))
      .def("expected", &BucketTracker::expected, py::arg("param"));
}

}  // namespace

void bind_buffer(py::module_& module) {
  bind_buffer_values(module);
  bind_plan(module);
  bind_tracker(module);
}

}  // namespace megacore::bindings
