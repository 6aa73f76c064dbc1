// Registers the operations of the CUDA module on emulated kernels, for CPU tensors, in a namespace
// of its own.

#include "gpu_operations.h"

// Returns whether torch took them; their schemas come from the caller.
extern "C" __attribute__((visibility("default"))) bool megacore_register_emulated() {
  return megacore::ops::register_gpu_kernels("megacore_emulated", "CPU");
}
