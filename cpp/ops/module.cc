// The extension module _ops: importing it registers the kernels of operations for CPUs in torch,
// which must have been imported before.

#include <Python.h>

#include "operations.h"

namespace megacore::ops {
namespace {

// The version whose C interface these sources use, as torch writes it: 2.11.
constexpr uint64_t kTorchVersion = (uint64_t{2} << 56) | (uint64_t{11} << 48);

struct Kernel {
  const char* name;
  StableKernel run;
};

constexpr Kernel kKernels[] = {
    {"_rms_norm", kernel_of<rms_norm>},
    {"_add_rms_norm", kernel_of<add_rms_norm>},
    {"_rms_norm_backward", kernel_of<rms_norm_backward>},
    {"_swiglu", kernel_of<swiglu>},
    {"_swiglu_backward", kernel_of<swiglu_backward>},
    {"_gelu", kernel_of<gelu>},
    {"_gelu_backward", kernel_of<gelu_backward>},
    {"_sort_by_expert", kernel_of<sort_by_expert>},
    {"_permute", kernel_of<permute>},
    {"_unpermute", kernel_of<unpermute>},
    {"_permute_both", kernel_of<permute_both>},
    {"_unpermute_both", kernel_of<unpermute_both>},
    {"_row_dots", kernel_of<row_dots>},
    {"_top_k", kernel_of<top_k>},
    {"_split_and_rotate", kernel_of<split_and_rotate>},
    {"_split_and_rotate_backward", kernel_of<split_and_rotate_backward>},
    {"_norm_and_rotate", kernel_of<norm_and_rotate>},
    {"_norm_and_rotate_backward", kernel_of<norm_and_rotate_backward>},
    {"_route", kernel_of<route>},
    {"_route_backward", kernel_of<route_backward>},
    {"_counter_dropout", kernel_of<counter_dropout>},
    {"_grouped_product", kernel_of<grouped_product>},
};

// Returns whether torch took all kernels. They stay registered until the process ends.
bool register_kernels() {
  TorchLibraryHandle library = nullptr;
  if (aoti_torch_library_init_impl("megacore", "CPU", __FILE_NAME__, __LINE__, &library) != 0) {
    return false;
  }
  for (const Kernel& kernel : kKernels) {
    if (torch_library_impl(library, kernel.name, kernel.run, kTorchVersion) != 0) {
      return false;
    }
  }
  return true;
}

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "_ops",
    "Operations of megacore on CPU tensors. Import torch first; this module is private.",
    -1,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace
}  // namespace megacore::ops

PyMODINIT_FUNC PyInit__ops() {
  if (!megacore::ops::register_kernels()) {
    PyErr_SetString(PyExc_ImportError, "torch did not take megacore's operations");
    return nullptr;
  }
  return PyModule_Create(&megacore::ops::definition);
}
