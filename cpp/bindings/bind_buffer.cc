#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "megacore/buffer/adamw.h"
#include "megacore/buffer/bucket_plan.h"
#include "megacore/buffer/bucket_tracker.h"
#include "megacore/buffer/shard_map.h"
#include "megacore/buffer/step_control.h"

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

void bind_adamw(py::module_& module) {
  def_kernel(
      module, "adamw_step",
      [](uintptr_t param, uintptr_t grad, uintptr_t exp_avg, uintptr_t exp_avg_sq,
         uintptr_t copy_out, bool copy_is_float16, int64_t numel, double lr, double beta1,
         double beta2, double eps, double weight_decay, double bias_correction1,
         double bias_correction2, double grad_scale, uintptr_t control, int num_threads) {
        buffer::AdamWOptions options = {.lr = lr,
                                        .beta1 = beta1,
                                        .beta2 = beta2,
                                        .eps = eps,
                                        .weight_decay = weight_decay,
                                        .bias_correction1 = bias_correction1,
                                        .bias_correction2 = bias_correction2,
                                        .grad_scale = grad_scale};
        if (const auto* decided = pointer<const buffer::StepControl>(control)) {
          if (decided->is_applied == 0.0) {
            return;
          }
          options = controlled(options, *decided);
        }
        buffer::adamw_step({.param = pointer<float>(param),
                            .grad = pointer<const float>(grad),
                            .exp_avg = pointer<float>(exp_avg),
                            .exp_avg_sq = pointer<float>(exp_avg_sq),
                            .copy_out = pointer<uint16_t>(copy_out),
                            .copy_is_float16 = copy_is_float16,
                            .numel = numel},
                           options, num_threads);
      },
      "param", "grad", "exp_avg", "exp_avg_sq", "copy_out", "copy_is_float16", "numel", "lr",
      "beta1", "beta2", "eps", "weight_decay", "bias_correction1", "bias_correction2", "grad_scale",
      "control", "num_threads");
  module.def(
      "decide_step",
      [](uintptr_t state, uintptr_t sums, uintptr_t control, double beta1, double beta2,
         double clip_grad, double loss_scale_interval, double num_averaged) {
        auto& decided = *pointer<buffer::StepControl>(control);
        decided = decide_step(*pointer<buffer::StepState>(state),
                              {.beta1 = beta1,
                               .beta2 = beta2,
                               .clip_grad = clip_grad,
                               .loss_scale_interval = loss_scale_interval,
                               .num_averaged = num_averaged},
                              *pointer<const buffer::StepSums>(sums), decided.lr);
      },
      py::kw_only(), py::arg("state"), py::arg("sums"), py::arg("control"), py::arg("beta1"),
      py::arg("beta2"), py::arg("clip_grad"), py::arg("loss_scale_interval"),
      py::arg("num_averaged"));
  def_kernel(
      module, "sum_of_squares",
      [](uintptr_t values, int64_t numel) {
        return buffer::sum_of_squares(pointer<const float>(values), numel);
      },
      "values", "numel");
}

}  // namespace

void bind_buffer(py::module_& module) {
  bind_buffer_values(module);
  bind_plan(module);
  bind_tracker(module);
  bind_adamw(module);
}

}  // namespace megacore::bindings
