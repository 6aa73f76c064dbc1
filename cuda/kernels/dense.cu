// Bound by memory: a norm has the row in registers between its sum and its result, so every element
// is read once and written once. The gradient of the weight is a sum over rows: each group of
// threads has the sums of its rows in registers, and a second kernel adds up those of all groups.

#include "column_sums.cuh"
#include "launch.h"
#include "megacore/base/check.h"
#include "megacore/cuda/dense.h"
#include "row_io.cuh"

namespace megacore::cuda {
namespace {

// Rows of up to this many packs are left to a warp each.
constexpr int64_t kPacksOfWarp = 128;
// A constant, so that sums are the same on every GPU; two blocks for each of an H100's processors.
constexpr int64_t kSumBlocksOfNorm = 264;

// Packs that a thread has of a row, as many as kPer; those behind the row are zero.
template <int kLanes, int kPer, typename Float, int kPack>
__device__ __forceinline__ void load_row(const Float* row,
                                         int64_t vectors,
                                         int lane,
                                         Pack<Float, kPack> (&packs)[kPer]) {
#pragma unroll
  for (int n = 0; n < kPer; ++n) {
    packs[n] = {};
    if (lane + n * kLanes < vectors) {
      packs[n] = load_pack<kPack>(row, lane + n * kLanes);
    }
  }
}

// Makes the compiler widen packs again where they are used next: kept from here, twice the
// registers would be spilled.
template <int kPer, typename Float, int kPack>
__device__ __forceinline__ void keep_narrow([[maybe_unused]] Pack<Float, kPack> (&packs)[kPer]) {
#if defined(__CUDA_ARCH__)
#pragma unroll
  for (int n = 0; n < kPer; ++n) {
    auto* words = reinterpret_cast<uint32_t*>(packs[n].values);
#pragma unroll
    for (int word = 0; word < kPackBytes / 4; ++word) {
      asm volatile("" : "+r"(words[word]));
    }
  }
#endif
}

template <typename Float, int kPack>
__device__ __forceinline__ Pack<Float, kPack> sum_of(const Pack<Float, kPack>& a,
                                                     const Pack<Float, kPack>& b) {
  Pack<Float, kPack> sum;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    narrow(widen(a.values[i]) + widen(b.values[i]), sum.values[i]);
  }
  return sum;
}

template <typename Float, int kPack, int kLanes, int kPer>
__global__ void __launch_bounds__(kRowThreads, 1) norm_kernel(const Float* __restrict__ x,
                                                              const Float* __restrict__ added,
                                                              const Float* __restrict__ weight,
                                                              Float* __restrict__ total,
                                                              Float* __restrict__ y,
                                                              float* __restrict__ scales,
                                                              int64_t rows,
                                                              int64_t width,
                                                              float eps) {
  __shared__ float warp_sums[kRowThreads / kWarp];
  const Team team = team_of(kLanes);
  const int64_t vectors = width / kPack;
  Pack<Float, kPack> weights[kPer];
  load_row<kLanes>(weight, vectors, team.lane, weights);
  for (int64_t row = team.group; row < rows; row += team.num_groups) {
    Pack<Float, kPack> packs[kPer];
    load_row<kLanes>(x + row * width, vectors, team.lane, packs);
    if (added != nullptr) {  // the same for every thread
      Pack<Float, kPack> more[kPer];
      load_row<kLanes>(added + row * width, vectors, team.lane, more);
#pragma unroll
      for (int n = 0; n < kPer; ++n) {
        if (team.lane + n * kLanes < vectors) {
          packs[n] = sum_of(packs[n], more[n]);
          store_pack(total + row * width, team.lane + n * kLanes, packs[n]);
        }
      }
    }
    float sum = 0.0F;
#pragma unroll
    for (int n = 0; n < kPer * kPack; ++n) {
      const float value = widen(packs[n / kPack].values[n % kPack]);
      sum += value * value;
    }
    sum = sum_over_row<kLanes>(sum, warp_sums);
    const float scale = 1.0F / sqrtf(sum / static_cast<float>(width) + eps);
    if (team.lane == 0) {
      scales[row] = scale;
    }
#pragma unroll
    for (int n = 0; n < kPer; ++n) {
      if (team.lane + n * kLanes < vectors) {
        Pack<Float, kPack> result;
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          narrow(widen(packs[n].values[i]) * scale * widen(weights[n].values[i]), result.values[i]);
        }
        store_pack(y + row * width, team.lane + n * kLanes, result);
      }
    }
  }
}

template <typename Float, int kPack, int kLanes, int kPer>
__global__ void __launch_bounds__(kRowThreads, 1)
    norm_backward_kernel(const Float* __restrict__ grad_y,
                         const Float* __restrict__ grad_sum,
                         const Float* __restrict__ x,
                         const Float* __restrict__ weight,
                         const float* __restrict__ scales,
                         Float* __restrict__ grad_x,
                         float* __restrict__ partial_sums,
                         int64_t rows,
                         int64_t width) {
  __shared__ float warp_sums[kRowThreads / kWarp];
  const Team team = team_of(kLanes);
  const int64_t vectors = width / kPack;
  Pack<Float, kPack> weights[kPer];
  load_row<kLanes>(weight, vectors, team.lane, weights);
  float sums[kPer * kPack] = {};
  for (int64_t row = team.group; row < rows; row += team.num_groups) {
    const float scale = scales[row];
    keep_narrow(weights);
    Pack<Float, kPack> grads[kPer];
    Pack<Float, kPack> packs[kPer];
    load_row<kLanes>(grad_y + row * width, vectors, team.lane, grads);
    load_row<kLanes>(x + row * width, vectors, team.lane, packs);
    float radial = 0.0F;
#pragma unroll
    for (int n = 0; n < kPer * kPack; ++n) {
      const float grad = widen(grads[n / kPack].values[n % kPack]);
      const float unit = widen(packs[n / kPack].values[n % kPack]) * scale;
      sums[n] += grad * unit;
      radial += grad * widen(weights[n / kPack].values[n % kPack]) * unit;
    }
    if (grad_x == nullptr) {  // the same for every thread
      continue;
    }
    radial = sum_over_row<kLanes>(radial, warp_sums) / static_cast<float>(width);
    keep_narrow(grads);
    keep_narrow(packs);
    keep_narrow(weights);
#pragma unroll
    for (int n = 0; n < kPer; ++n) {
      if (team.lane + n * kLanes < vectors) {
        Pack<Float, kPack> result;
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          const float unit = widen(packs[n].values[i]) * scale;
          const float grad = widen(grads[n].values[i]) * widen(weights[n].values[i]);
          narrow((grad - unit * radial) * scale, result.values[i]);
        }
        if (grad_sum != nullptr) {
          result = sum_of(result, load_pack<kPack>(grad_sum + row * width, team.lane + n * kLanes));
        }
        store_pack(grad_x + row * width, team.lane + n * kLanes, result);
      }
    }
  }
  if (partial_sums == nullptr) {
    return;
  }
#pragma unroll
  for (int n = 0; n < kPer * kPack; ++n) {
    const int64_t pack = team.lane + n / kPack * kLanes;
    if (pack < vectors) {
      partial_sums[team.group * width + pack * kPack + n % kPack] = sums[n];
    }
  }
}

// ---- launchers ----------------------------------------------------------------------------------

struct NormShape {
  bool is_short;
  int64_t blocks;  // of the backward pass
};

NormShape shape_of(FloatType type, int64_t rows, int64_t width) {
  const bool is_short = width * bytes_of(type) / kPackBytes <= kPacksOfWarp;
  const int64_t groups = is_short ? kRowThreads / kWarp : 1;
  return {is_short, std::clamp(divided_up(rows, groups), int64_t{1}, kSumBlocksOfNorm)};
}

void require_norm(FloatType type, int64_t rows, int64_t width) {
  const int64_t bytes = width * bytes_of(type);
  MC_REQUIRE(
      rows >= 0 && width >= 1 && bytes % kPackBytes == 0 && bytes / kPackBytes <= kMaxNormPacks,
      "a norm of {} rows of {} bytes; the kernel takes multiples of {} bytes up to {}", rows, bytes,
      kPackBytes, kMaxNormPacks * kPackBytes);
}

void require_packed(const void* pointer, const char* name) {
  MC_REQUIRE(is_packed(pointer), "{} must have an address that is a multiple of {} bytes", name,
             kPackBytes);
}

// Calls body.operator()<Float, kPack, kLanes, kPer>() for as many packs per thread as a row needs.
template <int kLanes, int kPer, typename Float, int kPack, typename Body>
void with_packs(int64_t vectors, const Body& body) {
  if constexpr (kPer * kLanes < (kLanes == kWarp ? kPacksOfWarp : kMaxNormPacks)) {
    if (vectors > int64_t{kPer} * kLanes) {
      return with_packs<kLanes, 2 * kPer, Float, kPack>(vectors, body);
    }
  }
  body.template operator()<Float, kPack, kLanes, kPer>();
}

template <typename Body>
void with_norm(FloatType type, int64_t width, bool is_short, const Body& body) {
  const auto run = [&]<typename Float>(Float) {
    constexpr int kPack = static_cast<int>(kPackBytes / sizeof(Float));
    if (is_short) {
      with_packs<kWarp, 1, Float, kPack>(width / kPack, body);
    } else {
      with_packs<kRowThreads, 1, Float, kPack>(width / kPack, body);
    }
  };
  switch (type) {
    case FloatType::kFloat32:
      return run(float{});
    case FloatType::kBfloat16:
      return run(Bfloat16{});
    case FloatType::kFloat16:
      return run(Float16{});
  }
}

}  // namespace

void rms_norm(const NormParams& params, cudaStream_t stream) {
  require_norm(params.type, params.rows, params.width);
  require_packed(params.x, "x");
  require_packed(params.added, "added");
  require_packed(params.weight, "weight");
  require_packed(params.sum, "sum");
  require_packed(params.y, "y");
  if (params.rows == 0) {
    return;
  }
  const NormShape shape = shape_of(params.type, params.rows, params.width);
  with_norm(
      params.type, params.width, shape.is_short,
      [&]<typename Float, int kPack, int kLanes, int kPer>() {
        launch("rms_norm", norm_kernel<Float, kPack, kLanes, kPer>,
               {.blocks = divided_up(params.rows, kRowThreads / kLanes), .threads = kRowThreads},
               stream, static_cast<const Float*>(params.x), static_cast<const Float*>(params.added),
               static_cast<const Float*>(params.weight), static_cast<Float*>(params.sum),
               static_cast<Float*>(params.y), params.scale, params.rows, params.width, params.eps);
      });
}

int64_t norm_partial_rows(FloatType type, int64_t rows, int64_t width) {
  const NormShape shape = shape_of(type, rows, width);
  return shape.blocks * (shape.is_short ? kRowThreads / kWarp : 1);
}

void rms_norm_backward(const NormBackwardParams& params, cudaStream_t stream) {
  require_norm(params.type, params.rows, params.width);
  require_packed(params.grad_y, "grad_y");
  require_packed(params.grad_sum, "grad_sum");
  require_packed(params.x, "x");
  require_packed(params.weight, "weight");
  require_packed(params.grad_x, "grad_x");
  MC_REQUIRE(params.grad_weight == nullptr || params.partial_sums != nullptr,
             "the gradient of the weight needs a workspace of partial sums");
  const NormShape shape = shape_of(params.type, params.rows, params.width);
  const bool sums = params.grad_weight != nullptr;
  with_norm(params.type, params.width, shape.is_short,
            [&]<typename Float, int kPack, int kLanes, int kPer>() {
              launch("rms_norm_backward", norm_backward_kernel<Float, kPack, kLanes, kPer>,
                     {.blocks = shape.blocks, .threads = kRowThreads}, stream,
                     static_cast<const Float*>(params.grad_y),
                     static_cast<const Float*>(params.grad_sum),
                     static_cast<const Float*>(params.x), static_cast<const Float*>(params.weight),
                     params.scale, static_cast<Float*>(params.grad_x),
                     sums ? params.partial_sums : nullptr, params.rows, params.width);
              if (sums) {
                auto* weight = static_cast<Float*>(params.grad_weight);
                launch_column_sums<Float>("rms_norm_backward", params.partial_sums,
                                          norm_partial_rows(params.type, params.rows, params.width),
                                          params.width, params.width, weight, nullptr, stream);
              }
            });
}

}  // namespace megacore::cuda
