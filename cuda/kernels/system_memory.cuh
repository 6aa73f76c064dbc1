// Memory that several GPUs share: flags in it, and the time.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace megacore::cuda {

// What was written before the flag got this value, by whichever GPU, is seen after the load.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* flag) {
  uint32_t value = 0;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t time = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

}  // namespace megacore::cuda
