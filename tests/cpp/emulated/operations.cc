// Registers the operations of the CUDA module on emulated kernels, for CPU tensors, in a namespace
// of its own.

#include "gpu_operations.h"
#include "kernels.h"

// Returns whether torch took them; their schemas come from the caller.
extern "C" __attribute__((visibility("default"))) bool megacore_register_emulated() {
  using namespace megacore::ops;
  constexpr Kernel kOthers[] = {{"_grouped_gemm_", kernel_of<grouped_gemm_>}};
  return register_kernels("megacore_emulated", "CPU", kOthers);
}
