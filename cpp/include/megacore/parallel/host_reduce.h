// Elementwise reduction of equally long arrays in a fixed order: the arithmetic of host_comm.h.
//
//   const std::byte* parts[] = {a, b, c};
//   reduce_parts({.parts = parts, .numel = 8, .dtype = HostDtype::kBFloat16,
//                 .reduction = HostReduction::kAvg, .output = out,
//                 .output_dtype = HostDtype::kFloat32});   // out[i] = float((a[i] + b[i]) + c[i])
//                 / 3
//
// bfloat16 and float16 are computed in fp32 and rounded once, to the type of the output. fp32 and
// fp64 are computed in their own precision. Integers wrap around; for bool, sum and max are "or". A
// maximum with a NaN is a NaN. Element i depends only on element i of the parts, so the result is
// the same for any split of the arrays into calls.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace megacore::parallel {

enum class HostDtype : uint8_t {
  kFloat32,
  kFloat64,
  kBFloat16,
  kFloat16,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt8,
  kBool,
};

enum class HostReduction : uint8_t { kSum, kMax, kAvg };

int64_t bytes_of(HostDtype dtype);
std::string_view name_of(HostDtype dtype);  // as torch writes it: "float32"
std::string_view name_of(HostReduction reduction);
bool is_floating_point(HostDtype dtype);

// Whether a reduction of `dtype` can be written as `output_dtype`: the same type, or both among
// float32, bfloat16 and float16.
bool can_reduce(HostDtype dtype, HostDtype output_dtype);

struct ReduceTask {
  std::span<const std::byte* const> parts;  // in the order of the additions, `numel` elements each
  int64_t numel = 0;
  HostDtype dtype = HostDtype::kFloat32;
  HostReduction reduction = HostReduction::kSum;  // kAvg: the sum divided by the number of parts
  std::byte* output = nullptr;                    // may be one of the parts if the types are equal
  HostDtype output_dtype = HostDtype::kFloat32;
};

// REQUIRES: at least one part, numel >= 0, can_reduce(dtype, output_dtype), and for kAvg a floating
// point type.
void reduce_parts(const ReduceTask& task);

}  // namespace megacore::parallel
