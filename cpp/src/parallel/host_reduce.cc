#include "megacore/parallel/host_reduce.h"

#include <algorithm>
#include <array>
#include <type_traits>

#include "megacore/base/check.h"
#include "megacore/base/low_precision.h"
#include "megacore/base/vector_clones.h"

namespace megacore::parallel {
namespace {

using base::BFloat16;
using base::Float16;
using base::Plain;

// Any byte but 0 is true.
struct Bool {
  using Stored = uint8_t;
  using Wide = uint8_t;
  static Wide widen(Stored value) { return value != 0 ? 1 : 0; }
  static Stored narrow(Wide value) { return value; }
};

struct Sum {
  template <typename T>
  static T combine(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      return a + b;
    } else {
      // Unsigned numbers wrap around; the overflow of signed ones would be undefined.
      using Unsigned = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
    }
  }
};

struct Max {
  template <typename T>
  static T combine(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      return a > b || a != a ? a : b;  // a NaN wins wherever it stands
    } else {
      return a > b ? a : b;
    }
  }
};

// The first two parts, so that the block is not written before it is needed.
template <typename Type, typename Op>
MC_VECTOR_CLONES void combine_two(typename Type::Wide* __restrict__ total,
                                  const typename Type::Stored* a,
                                  const typename Type::Stored* b,
                                  int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    total[i] = Op::combine(Type::widen(a[i]), Type::widen(b[i]));
  }
}

template <typename Type, typename Op>
MC_VECTOR_CLONES void combine_into(typename Type::Wide* __restrict__ total,
                                   const typename Type::Stored* __restrict__ part,
                                   int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    total[i] = Op::combine(total[i], Type::widen(part[i]));
  }
}

template <typename Wide>
MC_VECTOR_CLONES void divide(Wide* total, int64_t numel, Wide divisor) {
  for (int64_t i = 0; i < numel; ++i) {
    total[i] = total[i] / divisor;
  }
}

template <typename Type>
MC_VECTOR_CLONES void store(typename Type::Stored* __restrict__ output,
                            const typename Type::Wide* __restrict__ total,
                            int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    output[i] = Type::narrow(total[i]);
  }
}

template <typename T>
const T* element(const std::byte* start, int64_t index) {
  return reinterpret_cast<const T*>(start) + index;
}

// Runs block by block: the running total stays in the first-level cache, and a block is read from
// all parts before it is written, so the output may be one of them.
template <typename Type, typename Output, typename Op>
void reduce(const ReduceTask& task) {
  using Stored = typename Type::Stored;
  using Wide = typename Type::Wide;
  constexpr int64_t kBlockNumel = 8192 / static_cast<int64_t>(sizeof(Wide));
  std::array<Wide, kBlockNumel> total;
  auto* const output = reinterpret_cast<typename Output::Stored*>(task.output);
  for (int64_t at = 0; at < task.numel; at += kBlockNumel) {
    const int64_t numel = std::min(kBlockNumel, task.numel - at);
    const Stored* first = element<Stored>(task.parts[0], at);
    if (task.parts.size() == 1) {
      std::transform(first, first + numel, total.begin(), &Type::widen);
    } else {
      const Stored* second = element<Stored>(task.parts[1], at);
      combine_two<Type, Op>(total.data(), first, second, numel);
    }
    for (const std::byte* part : task.parts.subspan(std::min<size_t>(2, task.parts.size()))) {
      combine_into<Type, Op>(total.data(), element<Stored>(part, at), numel);
    }
    if constexpr (std::is_floating_point_v<Wide>) {
      if (task.reduction == HostReduction::kAvg) {
        divide<Wide>(total.data(), numel, static_cast<Wide>(task.parts.size()));
      }
    }
    store<Output>(output + at, total.data(), numel);
  }
}

template <typename Type, typename Output = Type>
void reduce_as(const ReduceTask& task) {
  if (task.reduction == HostReduction::kMax || std::is_same_v<Type, Bool>) {
    reduce<Type, Output, Max>(task);
  } else {
    reduce<Type, Output, Sum>(task);
  }
}

// Types that are computed in fp32.
template <typename Type>
void reduce_in_float(const ReduceTask& task) {
  switch (task.output_dtype) {
    case HostDtype::kBFloat16:
      return reduce_as<Type, BFloat16>(task);
    case HostDtype::kFloat16:
      return reduce_as<Type, Float16>(task);
    default:
      return reduce_as<Type, Plain<float>>(task);
  }
}

bool is_computed_in_float(HostDtype dtype) {
  return dtype == HostDtype::kFloat32 || dtype == HostDtype::kBFloat16 ||
         dtype == HostDtype::kFloat16;
}

struct DtypeFacts {
  std::string_view name;
  int64_t bytes;
};

constexpr std::array<DtypeFacts, 10> kDtypes = {{{"float32", 4},
                                                 {"float64", 8},
                                                 {"bfloat16", 2},
                                                 {"float16", 2},
                                                 {"int64", 8},
                                                 {"int32", 4},
                                                 {"int16", 2},
                                                 {"int8", 1},
                                                 {"uint8", 1},
                                                 {"bool", 1}}};

}  // namespace

int64_t bytes_of(HostDtype dtype) { return kDtypes[static_cast<size_t>(dtype)].bytes; }

std::string_view name_of(HostDtype dtype) { return kDtypes[static_cast<size_t>(dtype)].name; }

std::string_view name_of(HostReduction reduction) {
  constexpr std::array<std::string_view, 3> names = {"sum", "max", "avg"};
  return names[static_cast<size_t>(reduction)];
}

bool is_floating_point(HostDtype dtype) {
  return is_computed_in_float(dtype) || dtype == HostDtype::kFloat64;
}

bool can_reduce(HostDtype dtype, HostDtype output_dtype) {
  return dtype == output_dtype ||
         (is_computed_in_float(dtype) && is_computed_in_float(output_dtype));
}

void reduce_parts(const ReduceTask& task) {
  MC_INVARIANT(!task.parts.empty(), "a reduction without parts");
  MC_INVARIANT(can_reduce(task.dtype, task.output_dtype), "no such reduction");
  switch (task.dtype) {
    case HostDtype::kFloat32:
      return reduce_in_float<Plain<float>>(task);
    case HostDtype::kBFloat16:
      return reduce_in_float<BFloat16>(task);
    case HostDtype::kFloat16:
      return reduce_in_float<Float16>(task);
    case HostDtype::kFloat64:
      return reduce_as<Plain<double>>(task);
    case HostDtype::kInt64:
      return reduce_as<Plain<int64_t>>(task);
    case HostDtype::kInt32:
      return reduce_as<Plain<int32_t>>(task);
    case HostDtype::kInt16:
      return reduce_as<Plain<int16_t>>(task);
    case HostDtype::kInt8:
      return reduce_as<Plain<int8_t>>(task);
    case HostDtype::kUInt8:
      return reduce_as<Plain<uint8_t>>(task);
    case HostDtype::kBool:
      return reduce_as<Bool>(task);
  }
}

}  // namespace megacore::parallel
