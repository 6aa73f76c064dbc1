#include "operations.h"

namespace megacore::ops {

// Graph capture keeps addresses, not tensors: once nothing will read a graph's output through the
// allocator's eyes, the output must stop pinning its block, and yet later code needs a tensor at
// that address.
Tensor weak_tensor(Tensor tensor) {
  int64_t* strides = nullptr;
  int32_t type = 0, index = 0;
  check_torch(aoti_torch_get_strides(tensor.handle(), &strides), "get_strides");
  check_torch(aoti_torch_get_device_type(tensor.handle(), &type), "get_device_type");
  check_torch(aoti_torch_get_device_index(tensor.handle(), &index), "get_device_index");
  AtenTensorHandle weak = nullptr;
  check_torch(aoti_torch_create_tensor_from_blob(tensor.mutable_data<void>(), tensor.dim(),
                                                 tensor.sizes().data(), strides, 0, tensor.dtype(),
                                                 type, index, &weak),
              "create_tensor_from_blob");
  return Tensor(weak);
}

}  // namespace megacore::ops
