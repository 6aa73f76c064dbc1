// Marks small functions shared by the CPU code and the CUDA kernels.
//
//   MC_HOST_DEVICE int64_t twice(int64_t value) { return 2 * value; }
//
// Such a function uses no standard library container and throws nothing, so that both compilers
// accept it with the same result.

#pragma once

#if defined(__CUDACC__)
#define MC_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MC_HOST_DEVICE inline
#endif
