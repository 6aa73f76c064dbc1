// Device of a call: memory of torch's allocator, and the stream that kernels are queued on.

#pragma once

#include <cuda_runtime_api.h>

#include "arguments.h"
#include "megacore/cuda/float_type.h"

namespace megacore::ops {

// Current stream of torch on a device. Waits for nothing.
cudaStream_t current_stream(int32_t device_index);

// Address and size that kernels need to load several elements at once, in bytes.
inline constexpr uintptr_t kAlignment = 16;

// Makes the device of a tensor the current one while it exists, and queues on its current stream.
class Device {
 public:
  // Throws std::invalid_argument if `others` are on another device.
  template <typename... Others>
  explicit Device(const Tensor& tensor, const Others&... others) {
    check_torch(aoti_torch_get_device_type(tensor.handle(), &type_), "get_device_type");
    check_torch(aoti_torch_get_device_index(tensor.handle(), &index_), "get_device_index");
    (check_here(others), ...);
    // The CPU, on which these sources run with emulated kernels, has no index.
    if (index_ >= 0) {
      stream_ = current_stream(index_);
      // Last, as no destructor runs if this one throws.
      check_torch(aoti_torch_create_device_guard(index_, &guard_), "create_device_guard");
    }
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() {
    if (guard_ != nullptr) {
      aoti_torch_delete_device_guard(guard_);
    }
  }

  cudaStream_t stream() const { return stream_; }

  // New memory, contiguous. If a part of it will not be written, `partly` is any tensor of the
  // device: torch then fills the memory where it was asked for deterministic operations.
  Tensor empty(std::span<const int64_t> sizes,
               int32_t dtype,
               const Tensor* partly = nullptr) const {
    return new_tensor(sizes, dtype, type_, index_, partly);
  }
  Tensor empty(std::initializer_list<int64_t> sizes,
               int32_t dtype,
               const Tensor* partly = nullptr) const {
    return empty(std::span<const int64_t>(sizes.begin(), sizes.size()), dtype, partly);
  }
  Tensor empty_like(const Tensor& tensor) const { return empty(tensor.sizes(), tensor.dtype()); }

  // The tensor itself if it is contiguous and of the dtype, else a copy.
  Tensor contiguous(Tensor tensor, int32_t dtype) const {
    return tensor.dtype() == dtype && tensor.is_contiguous() ? std::move(tensor)
                                                             : copy(tensor, dtype);
  }
  Tensor contiguous(Tensor tensor) const {
    const int32_t dtype = tensor.dtype();
    return contiguous(std::move(tensor), dtype);
  }
  // The same at an address that is a multiple of kAlignment; torch's memory begins at one.
  Tensor aligned(Tensor tensor) const {
    const bool fits = tensor.is_contiguous() &&
                      reinterpret_cast<uintptr_t>(tensor.data<void>()) % kAlignment == 0;
    return fits ? std::move(tensor) : copy(tensor, tensor.dtype());
  }
  template <typename... Dtype>
  std::optional<Tensor> contiguous(std::optional<Tensor> tensor, Dtype... dtype) const {
    return tensor ? std::optional(contiguous(std::move(*tensor), dtype...)) : std::nullopt;
  }
  std::optional<Tensor> aligned(std::optional<Tensor> tensor) const {
    return tensor ? std::optional(aligned(std::move(*tensor))) : std::nullopt;
  }

 private:
  void check_here(const Tensor& tensor) const {
    int32_t type = 0, index = 0;
    check_torch(aoti_torch_get_device_type(tensor.handle(), &type), "get_device_type");
    check_torch(aoti_torch_get_device_index(tensor.handle(), &index), "get_device_index");
    MC_REQUIRE(type == type_ && index == index_,
               "all tensors of an operation must be on one device, got one of shape {} elsewhere",
               shape_text(tensor));
  }
  void check_here(const std::optional<Tensor>& tensor) const {
    if (tensor) {
      check_here(*tensor);
    }
  }
  Tensor copy(const Tensor& tensor, int32_t dtype) const {
    Tensor copy = empty(tensor.sizes(), dtype);
    check_torch(aoti_torch_copy_(copy.handle(), tensor.handle(), 0), "copy_");
    return copy;
  }

  int32_t type_ = 0;
  int32_t index_ = 0;
  DeviceGuardHandle guard_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

// Elements that kernels compute with.
inline cuda::FloatType float_type(const Tensor& tensor) {
  if (tensor.dtype() == kDTypes.float32) {
    return cuda::FloatType::kFloat32;
  }
  if (tensor.dtype() == kDTypes.bfloat16) {
    return cuda::FloatType::kBfloat16;
  }
  MC_REQUIRE(tensor.dtype() == kDTypes.float16,
             "dtype must be float32, bfloat16 or float16 on GPUs");
  return cuda::FloatType::kFloat16;
}

}  // namespace megacore::ops
