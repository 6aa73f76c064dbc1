// Marks a function with a hot loop for multiversioning: the function is compiled once per vector
// width, and the loader selects the widest one supported by the CPU. One build works on every
// x86-64.
//
//   MC_VECTOR_CLONES void add(float* __restrict__ sum, const float* __restrict__ x, int64_t n);
//
// Sanitizer builds use one version only, since their runtime is not ready when the loader selects.

#pragma once

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define MC_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
// With the instructions on 16-bit lanes and masks that avx512f alone has not.
#define MC_VECTOR_CLONES_V4 \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MC_VECTOR_CLONES
#define MC_VECTOR_CLONES_V4
#endif
