// Memory, threads and dtypes of operations on CPU tensors.

#pragma once

#include <numeric>

#include "megacore/moe/grouped_gemm.h"
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

// New memory on the CPU with the axes in the order of another tensor's memory, but for the last
// one, whose elements are neighbours.
inline Tensor empty_in_order_of(const Tensor& other,
                                std::span<const int64_t> sizes,
                                int32_t dtype) {
  const size_t dim = sizes.size();
  MC_REQUIRE(dim == other.sizes().size() && dim >= 1 && dim <= kMaxDim,
             "a result must have {} axes, got {}", other.dim(), dim);
  const std::span<const int64_t> order = other.strides();
  std::array<size_t, kMaxDim> axes;
  std::iota(axes.begin(), axes.begin() + dim, size_t{0});
  std::stable_sort(axes.begin(), axes.begin() + dim - 1,
                   [&](size_t a, size_t b) { return order[a] > order[b]; });
  std::array<int64_t, kMaxDim> strides;
  int64_t stride = 1;
  for (size_t i = dim; i-- > 0;) {
    strides[axes[i]] = stride;
    stride *= std::max(sizes[axes[i]], int64_t{1});
  }
  AtenTensorHandle handle = nullptr;
  check_torch(aoti_torch_empty_strided(static_cast<int64_t>(dim), sizes.data(), strides.data(),
                                       dtype, aoti_torch_device_type_cpu(), 0, &handle),
              "empty_strided");
  return Tensor(handle);
}

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

// The format of a dtype; others are cast to fp32.
inline moe::NumberFormat format_of(int32_t dtype) {
  if (dtype == kDTypes.bfloat16) {
    return moe::NumberFormat::kBFloat16;
  }
  return dtype == kDTypes.float16 ? moe::NumberFormat::kFloat16 : moe::NumberFormat::kFloat32;
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
