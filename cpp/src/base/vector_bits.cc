#include "megacore/base/vector_clones.h"

namespace megacore::base {

int vector_bits() {
#if defined(__x86_64__)
#if !defined(MEGACORE_NO_AVX512)
  if (__builtin_cpu_supports("avx512f")) {
    return 512;
  }
#endif
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return 256;
  }
#endif
  return 128;
}

}  // namespace megacore::base
