// Turns an error code of the CUDA runtime into an exception that says what failed.
//
//   check(cudaGetLastError(), "launching adamw_step on {} elements", numel);
//
// Throws std::runtime_error (RuntimeError in Python). Only return codes are looked at: this module
// has its own copy of the runtime, so errors of torch's calls never show up here.

#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>

#include "megacore/base/check.h"

namespace megacore::cuda {

// Throws unless `status` is cudaSuccess. `doing` begins with a participle: "launching {}".
template <typename... Parts>
void check(cudaError_t status,
           base::FormatText<std::type_identity_t<Parts>...> doing,
           const Parts&... parts) {
  if (status != cudaSuccess) {
    throw std::runtime_error(base::format_text("CUDA error {} ({}) while ",
                                               static_cast<int>(status),
                                               cudaGetErrorString(status)) +
                             base::format_text<Parts...>(doing, parts...));
  }
}

}  // namespace megacore::cuda
