// Memory, threads and dtypes of operations on CPU tensors.

#pragma once

#include "operations.h"

namespace megacore::ops {

// New memory on the CPU, contiguous. If a part of it will not be written, `partly` is any tensor on
// the CPU: torch then fills the memory where it was asked for deterministic operations.
inline Tensor empty(std::span<const int64_t> sizes, int32_t dtype, const Tensor* partly = nullptr) {
  return new_tensor(sizes, dtype, aoti_torch_device_type_cpu(), 0, partly);
}
inline Tensor empty(std::initializer_list<int64_t> sizes,
                    int32_t dtype,
                    const Tensor* partly = nullptr) {
  return empty(std::span<const int64_t>(sizes.begin(), sizes.size()), dtype, partly);
}
inline Tensor empty_like(const Tensor& tensor) { return empty(tensor.sizes(), tensor.dtype()); }

// The tensor itself if it is contiguous and of the dtype, else a copy.
inline Tensor contiguous(Tensor tensor, int32_t dtype) {
  if (tensor.dtype() == dtype && tensor.is_contiguous()) {
    return tensor;
  }
  Tensor copy = empty(tensor.sizes(), dtype);
  check_torch(aoti_torch_copy_(copy.handle(), tensor.handle(), 0), "copy_");
  return copy;
}
inline Tensor contiguous(Tensor tensor) {
  const int32_t dtype = tensor.dtype();
  return contiguous(std::move(tensor), dtype);
}
inline std::optional<Tensor> contiguous(std::optional<Tensor> tensor) {
  return tensor ? std::optional(contiguous(std::move(*tensor))) : std::nullopt;
}
inline std::optional<Tensor> contiguous(std::optional<Tensor> tensor, int32_t dtype) {
  return tensor ? std::optional(contiguous(std::move(*tensor), dtype)) : std::nullopt;
}

// Threads that an operation may use.
inline int num_threads() {
  uint32_t num_threads = 1;
  check_torch(torch_get_num_threads(&num_threads), "get_num_threads");
  return static_cast<int>(num_threads);
}

// Calls `run` with an element of a dtype; that of bfloat16 is an unsigned integer.
template <typename Run>
void for_dtype(int32_t dtype, const Run& run) {
  if (dtype == kDTypes.float32) {
    run(float{});
    return;
  }
  MC_REQUIRE(dtype == kDTypes.bfloat16, "dtype must be float32 or bfloat16 on CPUs");
  run(uint16_t{});
}

}  // namespace megacore::ops
