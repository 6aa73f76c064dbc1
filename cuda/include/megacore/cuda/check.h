// Turns an error code of the CUDA runtime into an exception that says what failed.
//
//   check(cudaGetLastError(), "launching adamw_step on ", numel, " elements");
//
// Throws std::runtime_error (RuntimeError in Python). Only return codes are looked at: this module
// has its own copy of the runtime, so errors of torch's calls never show up here.

#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>

#include "megacore/base/check.h"

namespace megacore::cuda {

// Throws unless `status` is cudaSuccess; `doing` are the parts of a message: "launching ...".
template <typename... Parts>
void check(cudaError_t status, const Parts&... doing) {
  if (status != cudaSuccess) {
    throw std::runtime_error(base::concat("CUDA error ",
                                          static_cast<int>(status),
                                          " (",
                                          cudaGetErrorString(status),
                                          ") while ",
                                          doing...));
  }
}

}  // namespace megacore::cuda
