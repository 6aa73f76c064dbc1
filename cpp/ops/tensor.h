// Tensors of torch in the operations, over its stable C interface.
//
//   std::tuple<Tensor, Tensor> halves(Tensor x, std::optional<Tensor> scale, double factor);
//
// is registered as kernel_of<halves>, whose arguments and results must be those of the schema in
// Python: Tensor, Tensor? and float here, int64_t for int and SymInt, bool for bool, and a struct
// for several of them. Operations run without the GIL. New memory comes from cpu.h, or for GPUs
// from cuda/ops/device.h.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "megacore/base/check.h"
#include "torch_functions.h"

namespace megacore::ops {

// Throws if a function of torch failed. torch has printed the reason to stderr.
inline void check_torch(int32_t error, const char* function) {
  if (error != 0) {
    throw std::runtime_error(std::string(function) + " of torch failed");
  }
}

// Numbers that torch has chosen for dtypes.
struct DTypes {
  int32_t float32 = aoti_torch_dtype_float32();
  int32_t float64 = aoti_torch_dtype_float64();
  int32_t bfloat16 = aoti_torch_dtype_bfloat16();
  int32_t float16 = aoti_torch_dtype_float16();
  int32_t float8 = aoti_torch_dtype_float8_e4m3fn();
  int32_t uint8 = aoti_torch_dtype_uint8();
  int32_t int32 = aoti_torch_dtype_int32();
  int32_t int64 = aoti_torch_dtype_int64();
  int32_t boolean = aoti_torch_dtype_bool();
};
inline const DTypes kDTypes;

// Owner of a tensor. Copying it would need another handle, so it can only be moved.
class Tensor {
 public:
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {
    int64_t dim = 0;
    int64_t* sizes = nullptr;
    check_torch(aoti_torch_get_dim(handle, &dim), "get_dim");
    check_torch(aoti_torch_get_sizes(handle, &sizes), "get_sizes");
    check_torch(aoti_torch_get_dtype(handle, &dtype_), "get_dtype");
    sizes_ = {sizes, static_cast<size_t>(dim)};
  }
  Tensor(Tensor&& other) noexcept
      : handle_(std::exchange(other.handle_, nullptr)),
        sizes_(other.sizes_),
        dtype_(other.dtype_) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    sizes_ = other.sizes_;
    dtype_ = other.dtype_;
    return *this;
  }
  ~Tensor() {
    if (handle_ != nullptr) {
      aoti_torch_delete_tensor_object(handle_);
    }
  }

  AtenTensorHandle handle() const { return handle_; }
  AtenTensorHandle release() && { return std::exchange(handle_, nullptr); }

  std::span<const int64_t> sizes() const { return sizes_; }
  int64_t dim() const { return static_cast<int64_t>(sizes_.size()); }
  // REQUIRES: 0 <= axis < dim().
  int64_t size(int64_t axis) const { return sizes_[static_cast<size_t>(axis)]; }
  int64_t numel() const {
    int64_t numel = 0;
    check_torch(aoti_torch_get_numel(handle_, &numel), "get_numel");
    return numel;
  }
  int32_t dtype() const { return dtype_; }
  bool has_sizes_of(const Tensor& other) const {
    return std::equal(sizes_.begin(), sizes_.end(), other.sizes_.begin(), other.sizes_.end());
  }
  bool is_contiguous() const {
    bool is_contiguous = false;
    check_torch(aoti_torch_is_contiguous(handle_, &is_contiguous), "is_contiguous");
    return is_contiguous;
  }

  std::span<const int64_t> strides() const {
    int64_t* strides = nullptr;
    check_torch(aoti_torch_get_strides(handle_, &strides), "get_strides");
    return {strides, sizes_.size()};
  }

  // REQUIRES: T is the element of the dtype.
  template <typename T>
  const T* data() const {
    const void* data = nullptr;
    check_torch(torch_get_const_data_ptr(handle_, &data), "get_const_data_ptr");
    return static_cast<const T*>(data);
  }
  template <typename T>
  T* mutable_data() const {
    void* data = nullptr;
    check_torch(torch_get_mutable_data_ptr(handle_, &data), "get_mutable_data_ptr");
    return static_cast<T*>(data);
  }

 private:
  AtenTensorHandle handle_;
  std::span<const int64_t> sizes_;  // memory of the tensor
  int32_t dtype_ = 0;
};

// Another owner of the same tensor.
inline Tensor other_owner_of(const Tensor& tensor) {
  AtenTensorHandle handle = nullptr;
  check_torch(aoti_torch_new_tensor_handle(tensor.handle(), &handle), "new_tensor_handle");
  return Tensor(handle);
}

// Elements of an optional tensor; null without one.
template <typename T>
const T* data_of(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->data<T>() : nullptr;
}

// A shape as Python writes it.
inline std::string shape_text(std::span<const int64_t> sizes) {
  std::string text;
  for (const int64_t size : sizes) {
    text += (text.empty() ? "" : ", ") + std::to_string(size);
  }
  return "(" + text + (sizes.size() == 1 ? ",)" : ")");
}
inline std::string shape_text(const Tensor& tensor) { return shape_text(tensor.sizes()); }

inline constexpr size_t kMaxDim = 64;  // of torch

// New memory on a device, contiguous. With `partly`, any tensor of the device, torch fills it where
// it was asked for deterministic operations.
inline Tensor new_tensor(std::span<const int64_t> sizes,
                         int32_t dtype,
                         int32_t device_type,
                         int32_t device_index,
                         const Tensor* partly) {
  AtenTensorHandle handle = nullptr;
  const auto dim = static_cast<int64_t>(sizes.size());
  if (partly != nullptr) {
    check_torch(aoti_torch_aten_new_empty(partly->handle(), sizes.data(), dim, &dtype, nullptr,
                                          nullptr, 0, nullptr, &handle),
                "new_empty");
    return Tensor(handle);
  }
  MC_REQUIRE(sizes.size() <= kMaxDim, "tensors have at most {} axes, got {}", kMaxDim, dim);
  std::array<int64_t, kMaxDim> strides;
  int64_t stride = 1;
  for (size_t axis = sizes.size(); axis-- > 0;) {
    strides[axis] = stride;
    stride *= sizes[axis] > 1 ? sizes[axis] : 1;
  }
  check_torch(aoti_torch_empty_strided(dim, sizes.data(), strides.data(), dtype, device_type,
                                       device_index, &handle),
              "empty_strided");
  return Tensor(handle);
}

// ---- between torch's stack and C++ --------------------------------------------------------------
// Takes an argument off the stack, and its place to the next one.
template <typename T>
struct Argument {
  static_assert(std::is_same_v<T, double> || std::is_same_v<T, int64_t> || std::is_same_v<T, bool>);
  static constexpr size_t kCount = 1;
  static T take(const StableIValue*& next) {
    T argument;
    std::memcpy(&argument, next++, sizeof(argument));
    return argument;
  }
};
template <>
struct Argument<Tensor> {
  static constexpr size_t kCount = 1;
  static Tensor take(const StableIValue*& next) {
    return Tensor(reinterpret_cast<AtenTensorHandle>(*next++));
  }
};
template <typename T>
struct Argument<std::optional<T>> {
  static constexpr size_t kCount = 1;
  static std::optional<T> take(const StableIValue*& next) {
    const auto* held = reinterpret_cast<StableIValue*>(*next++);
    if (held == nullptr) {
      return std::nullopt;
    }
    const StableIValue inner = *held;
    delete held;  // torch has made it by new
    const StableIValue* at = &inner;
    return Argument<T>::take(at);
  }
};
// Several arguments in a struct, which names their types as the tuple `Arguments`.
template <typename T>
  requires requires { typename T::Arguments; }
struct Argument<T> {
  template <typename... Parts>
  static constexpr size_t count(std::type_identity<std::tuple<Parts...>>) {
    return (Argument<Parts>::kCount + ...);
  }
  template <typename... Parts>
  static T take(const StableIValue*& next, std::type_identity<std::tuple<Parts...>>) {
    return T{Argument<Parts>::take(next)...};
  }
  static constexpr std::type_identity<typename T::Arguments> kParts = {};
  static constexpr size_t kCount = count(kParts);
  static T take(const StableIValue*& next) { return take(next, kParts); }
};

inline StableIValue give(Tensor tensor) {
  return reinterpret_cast<StableIValue>(std::move(tensor).release());
}

// Takes all arguments off the stack before `run` may throw, and puts its results there.
template <typename Result, typename... Arguments>
void call(Result (*run)(Arguments...), StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  constexpr size_t kInputs = (Argument<Arguments>::kCount + ...);
  MC_INVARIANT(inputs == kInputs, "an operation has {} arguments, its schema {}", kInputs, inputs);
  const auto on_arguments = [&] {
    const StableIValue* next = stack;
    return std::apply(run, std::tuple<Arguments...>{Argument<Arguments>::take(next)...});
  };
  uint64_t given = 0;
  if constexpr (std::is_void_v<Result>) {
    on_arguments();
  } else if constexpr (std::is_same_v<Result, Tensor>) {
    stack[given++] = give(on_arguments());
  } else {
    const auto put = [&](auto&&... results) { ((stack[given++] = give(std::move(results))), ...); };
    std::apply(put, on_arguments());
  }
  MC_INVARIANT(outputs == given, "an operation has {} results, its schema {}", given, outputs);
}

template <auto kRun>
void kernel_of(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs) {
  call(kRun, stack, num_inputs, num_outputs);
}

}  // namespace megacore::ops
