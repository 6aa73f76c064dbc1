// The extension module _ops: importing it registers the kernels of operations for CPUs in torch,
// which must have been imported before.

#include <Python.h>

#include "kernels.h"

namespace megacore::ops {
namespace {

constexpr Kernel kOthers[] = {{"_grouped_product", kernel_of<grouped_product>},
                              {"_attention", kernel_of<attention>},
                              {"_attention_backward", kernel_of<attention_backward>}};
constexpr Kernel kOfAllDevices[] = {{"_weak_tensor", kernel_of<weak_tensor>}};

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
  using namespace megacore::ops;
  if (!register_kernels("megacore", "CPU", kOthers) ||
      !register_for("megacore", "CompositeExplicitAutograd", kOfAllDevices)) {
    PyErr_SetString(PyExc_ImportError, "torch did not take megacore's operations");
    return nullptr;
  }
  return PyModule_Create(&megacore::ops::definition);
}
