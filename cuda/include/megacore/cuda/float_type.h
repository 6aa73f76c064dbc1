// Element types that kernels on tokens know. Arithmetic is fp32 for all of them.

#pragma once

#include <cstdint>

namespace megacore::cuda {

enum class FloatType : uint8_t { kFloat32, kBfloat16, kFloat16 };

}  // namespace megacore::cuda
