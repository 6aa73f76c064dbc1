#include <pybind11/stl.h>

#include <sstream>
#include <string>
#include <vector>

#include "bindings.h"
#include "megacore/cuda/check.h"

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
  module.def("device_count", &device_count);
  module.def("runtime_version", &runtime_version);
  module.def("compiled_archs", &compiled_archs);
  megacore::bindings::bind_clones(module);
  megacore::bindings::bind_fp8(module);
  megacore::bindings::bind_gemm(module);
  megacore::bindings::bind_layers(module);
  megacore::bindings::bind_optim(module);
  megacore::bindings::bind_peers(module);
  megacore::bindings::bind_plan(module);
  megacore::bindings::bind_tokens(module);
}
