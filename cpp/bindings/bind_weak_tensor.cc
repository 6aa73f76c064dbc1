// A tensor over memory that it does not own, handed to torch as a DLPack capsule.
//
// Graph capture keeps addresses, not tensors: once nothing will read a graph's output through the
// allocator's eyes, the output must stop pinning its block, and yet later code needs a tensor at
// that address. The structs below are those of DLPack 0.x, which is a stable binary interface:
// https://dmlc.github.io/dlpack/latest/c_api.html.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "bindings.h"
#include "megacore/base/check.h"

namespace py = pybind11;

namespace megacore::bindings {
namespace {

struct Device {
  int32_t type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t num_dims;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor* self);
};

// What a capsule owns: shape and strides, never the data.
struct WeakTensor {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  ManagedTensor managed;
};

constexpr const char* kFreshName = "dltensor";

void delete_unused_capsule(PyObject* capsule) {
  // Whoever takes the tensor renames the capsule and calls the deleter himself.
  if (PyCapsule_IsValid(capsule, kFreshName) != 0) {
    auto* managed = static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule, kFreshName));
    managed->deleter(managed);
  }
}

py::object weak_tensor_capsule(uintptr_t data,
                               std::vector<int64_t> shape,
                               std::vector<int64_t> strides,
                               int dtype_code,
                               int dtype_bits,
                               int device_type,
                               int device_id) {
  MC_REQUIRE(shape.size() == strides.size(),
             "a tensor of {} dimensions has as many strides, not {}", shape.size(), strides.size());
  auto weak = std::make_unique<WeakTensor>();
  weak->shape = std::move(shape);
  weak->strides = std::move(strides);
  weak->managed = {
      .tensor = {.data = reinterpret_cast<void*>(data),
                 .device = {device_type, device_id},
                 .num_dims = static_cast<int32_t>(weak->shape.size()),
                 .dtype = {static_cast<uint8_t>(dtype_code), static_cast<uint8_t>(dtype_bits), 1},
                 .shape = weak->shape.data(),
                 .strides = weak->strides.data(),
                 .byte_offset = 0},
      .context = weak.get(),
      .deleter = [](ManagedTensor* self) { delete static_cast<WeakTensor*>(self->context); }};
  PyObject* capsule = PyCapsule_New(&weak->managed, kFreshName, &delete_unused_capsule);
  if (capsule == nullptr) {
    throw py::error_already_set();
  }
  weak.release();
  return py::reinterpret_steal<py::object>(capsule);
}

}  // namespace

void bind_weak_tensor(py::module_& module) {
  module.def("weak_tensor_capsule", &weak_tensor_capsule, py::arg("data"), py::kw_only(),
             py::arg("shape"), py::arg("strides"), py::arg("dtype_code"), py::arg("dtype_bits"),
             py::arg("device_type"), py::arg("device_id"));
}

}  // namespace megacore::bindings
