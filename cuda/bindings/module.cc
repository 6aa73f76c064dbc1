#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <sstream>
#include <string>
#include <vector>

#include "gpu_operations.h"
#include "kernel_limits.h"
#include "megacore/cuda/check.h"
#include "megacore/cuda/grouped_gemm.h"
#include "megacore/cuda/peer_exchange.h"
#include "megacore/cuda/plan_offload.h"

namespace {

// Any error means that no device can be used: no driver, a driver too old, a hidden device.
int device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

int runtime_version() {
  int version = 0;
  megacore::cuda::check(cudaRuntimeGetVersion(&version), "asking for the runtime version");
  return version;
}

// The newest version of CUDA that the driver supports; 0 without a driver.
int driver_version() {
  int version = 0;
  megacore::cuda::check(cudaDriverGetVersion(&version), "asking for the driver's version");
  return version;
}

std::vector<std::string> compiled_archs() {
  std::vector<std::string> archs;
  std::istringstream text(MEGACORE_CUDA_ARCHS);
  for (std::string arch; std::getline(text, arch, ',');) {
    archs.push_back(arch);
  }
  return archs;
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "CUDA kernels of megacore. Use megacore.ops; this module is private.";
  if (!megacore::ops::register_gpu_kernels("megacore", "CUDA")) {
    throw pybind11::import_error("torch did not take megacore's operations");
  }
  module.def("device_count", &device_count);
  module.def("runtime_version", &runtime_version);
  module.def("driver_version", &driver_version);
  module.def("compiled_archs", &compiled_archs);
  module.def("grouped_gemm_archs", &megacore::cuda::grouped_gemm_archs);
  module.def("peer_sort_numel", &megacore::cuda::peer_sort_numel, pybind11::kw_only(),
             pybind11::arg("num_tokens"), pybind11::arg("num_choices"),
             pybind11::arg("num_experts"));
  for (const auto& [name, limit] : megacore::cuda::kLimits) {
    module.attr(name) = limit;
  }
  module.def(
      "plan_offload_bytes",
      [](int64_t num_ranks, int64_t num_experts, int64_t num_spare_slots) {
        return megacore::cuda::plan_offload_bytes({.num_ranks = num_ranks,
                                                   .num_experts = num_experts,
                                                   .num_spare_slots = num_spare_slots});
      },
      pybind11::kw_only(), pybind11::arg("num_ranks"), pybind11::arg("num_experts"),
      pybind11::arg("num_spare_slots"));
}
