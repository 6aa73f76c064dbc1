// One function per topic fills the extension module; module.cc calls them.

#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "def_kernel.h"
#include "megacore/base/check.h"

namespace megacore::bindings {

// Tensors cross the boundary as integers (Tensor.data_ptr()).
template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void bind_parallel(pybind11::module_& module);
void bind_pipeline(pybind11::module_& module);
void bind_program(pybind11::module_& module);           // after bind_pipeline
void bind_schedule_catalog(pybind11::module_& module);  // after bind_pipeline
void bind_buffer(pybind11::module_& module);
void bind_checksum(pybind11::module_& module);
void bind_random(pybind11::module_& module);
void bind_data(pybind11::module_& module);
void bind_moe(pybind11::module_& module);
void bind_peers(pybind11::module_& module);   // after bind_parallel
void bind_clones(pybind11::module_& module);  // after bind_parallel
void bind_graph(pybind11::module_& module);

}  // namespace megacore::bindings
