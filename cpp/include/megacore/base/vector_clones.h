// Marks a function with a hot loop for multiversioning: the function is compiled once per vector
// width, and the loader selects the widest one supported by the CPU. One build works on every
// x86-64.
//
//   MC_VECTOR_CLONES void add(float* __restrict__ sum, const float* __restrict__ x, int64_t n);
//
// Sanitizer builds use one version only, since their runtime is not ready when the loader selects.
// A build with MEGACORE_AVX512=OFF has no version for AVX-512.

#pragma once

namespace megacore::base {

// Bits of the widest vectors for which this build has kernels and this processor instructions: 512,
// 256 or 128.
int vector_bits();

}  // namespace megacore::base

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#if defined(MEGACORE_NO_AVX512)
#define MC_VECTOR_CLONES __attribute__((target_clones("avx2", "default")))
#define MC_VECTOR_CLONES_V4 __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define MC_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
// With the instructions on 16-bit lanes and masks that avx512f alone has not.
#define MC_VECTOR_CLONES_V4 \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
#else
#define MC_VECTOR_CLONES
#define MC_VECTOR_CLONES_V4
#endif
