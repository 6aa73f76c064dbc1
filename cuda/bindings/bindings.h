// One function per topic fills the extension module; module.cc calls them.

#pragma once

#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string_view>

#include "def_kernel.h"
#include "megacore/base/check.h"
#include "megacore/cuda/float_type.h"

namespace megacore::bindings {

// Tensors and streams cross the boundary as integers (Tensor.data_ptr(), Stream.cuda_stream).
template <typename T>
T* device_pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline cudaStream_t stream_handle(uintptr_t stream) {
  return reinterpret_cast<cudaStream_t>(stream);
}

// Named as torch names them.
inline cuda::FloatType float_type(std::string_view dtype) {
  if (dtype == "float32") {
    return cuda::FloatType::kFloat32;
  }
  if (dtype == "bfloat16") {
    return cuda::FloatType::kBfloat16;
  }
  MC_REQUIRE(dtype == "float16", "the kernels know float32, bfloat16 and float16, not \"{}\"",
             dtype);
  return cuda::FloatType::kFloat16;
}

void bind_clones(pybind11::module_& module);
void bind_peers(pybind11::module_& module);

}  // namespace megacore::bindings
