#include <dlfcn.h>

#include "device.h"

namespace megacore::ops {

// The function is in a library that a torch without CUDA does not have; it was loaded by torch,
// which does not offer its functions to other modules.
cudaStream_t current_stream(int32_t device_index) {
  using GetStream = int32_t (*)(int32_t, void**);
  static const auto get_stream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* function =
        library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    if (function == nullptr) {
      throw std::runtime_error("this torch has no libtorch_cuda.so with its current stream");
    }
    return reinterpret_cast<GetStream>(function);
  }();
  void* stream = nullptr;
  check_torch(get_stream(device_index, &stream), "get_current_cuda_stream");
  return static_cast<cudaStream_t>(stream);
}

}  // namespace megacore::ops
