// Activations are bound by memory: every element is read once and written once. The gradient of a
// row's weight is a sum over the row, formed by the threads that hold the row anyway.

#include "launch.h"
#include "megacore/base/check.h"
#include "megacore/cuda/activations.h"
#include "row_io.cuh"

namespace megacore::cuda {
namespace {

using moe::Activation;

// Above 1 + e^88 the quotient is zero, which is where a sigmoid ends anyway.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0F, 1.0F + expf(-x)); }

// 0.5 (1 + tanh(u)) = sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
constexpr float kGeluScale = 1.5957691216057308F;
constexpr float kGeluCubic = 0.044715F;

__device__ __forceinline__ float gelu_sigmoid(float x) {
  return sigmoid(kGeluScale * (x + kGeluCubic * x * x * x));
}

template <Activation kKind>
inline constexpr int kHalves = kKind == Activation::kSwiglu ? 2 : 1;

template <Activation kKind>
__device__ __forceinline__ float activated(float gate, float up) {
  if constexpr (kKind == Activation::kSwiglu) {
    return gate * sigmoid(gate) * up;
  } else {
    return gate * gelu_sigmoid(gate);
  }
}

struct Gradients {
  float gate;
  float up;
  float prob;  // what the element adds to the gradient of the row's weight
};

template <Activation kKind>
__device__ __forceinline__ Gradients gradients(float grad, float gate, float up, float prob) {
  if constexpr (kKind == Activation::kSwiglu) {
    const float s = sigmoid(gate);
    const float silu = gate * s;
    const float weighted = grad * prob;
    return {weighted * up * (s * (1.0F + gate * (1.0F - s))), weighted * silu, grad * (silu * up)};
  } else {
    const float s = gelu_sigmoid(gate);
    const float inner = kGeluScale * (1.0F + 3.0F * kGeluCubic * gate * gate);
    return {grad * prob * (s * (1.0F + gate * (1.0F - s) * inner)), 0.0F, grad * (gate * s)};
  }
}

// The launch bound of 1: a block more per processor is not worth a spill.
template <Activation kKind, typename Float, int kPack>
__global__ void __launch_bounds__(kRowThreads, 1) activate_kernel(const Float* __restrict__ x,
                                                                  const float* __restrict__ probs,
                                                                  Float* __restrict__ y,
                                                                  const int64_t* num_rows,
                                                                  int64_t rows,
                                                                  int64_t width,
                                                                  int lanes) {
  const Team team = team_of(lanes);
  const int64_t vectors = width / kPack;
  rows = rows_in_use(num_rows, rows);
  for (int64_t row = team.group; row < rows; row += team.num_groups) {
    const Float* from = x + row * kHalves<kKind> * width;
    const float prob = probs == nullptr ? 1.0F : probs[row];
#pragma unroll 2
    for (int64_t i = team.lane; i < vectors; i += lanes) {
      const Pack<Float, kPack> gate = load_pack<kPack>(from, i);
      Pack<Float, kPack> up = {};
      if constexpr (kKind == Activation::kSwiglu) {
        up = load_pack<kPack>(from + width, i);
      }
      Pack<Float, kPack> result;
#pragma unroll
      for (int n = 0; n < kPack; ++n) {
        narrow(prob * activated<kKind>(widen(gate.values[n]), widen(up.values[n])),
               result.values[n]);
      }
      store_pack(y + row * width, i, result);
    }
  }
}

// kLanes is a warp, or the whole block: then all its threads take the same number of turns.
template <Activation kKind, typename Float, int kPack, int kLanes>
__global__ void __launch_bounds__(kRowThreads)
    activate_backward_kernel(const Float* __restrict__ grad_y,
                             const Float* __restrict__ x,
                             const float* __restrict__ probs,
                             Float* __restrict__ grad_x,
                             float* __restrict__ grad_probs,
                             const int64_t* num_rows,
                             int64_t rows,
                             int64_t width) {
  static_assert(kLanes == kWarp || kLanes == kRowThreads);
  __shared__ float warp_sums[kRowThreads / kWarp];
  const Team team = team_of(kLanes);
  const int64_t vectors = width / kPack;
  rows = rows_in_use(num_rows, rows);
  for (int64_t row = team.group; row < rows; row += team.num_groups) {
    const int64_t start = row * kHalves<kKind> * width;
    const float prob = probs == nullptr ? 1.0F : probs[row];
    float sum = 0.0F;
    for (int64_t i = team.lane; i < vectors; i += kLanes) {
      const Pack<Float, kPack> grad = load_pack<kPack>(grad_y + row * width, i);
      const Pack<Float, kPack> gate = load_pack<kPack>(x + start, i);
      Pack<Float, kPack> up = {};
      if constexpr (kKind == Activation::kSwiglu) {
        up = load_pack<kPack>(x + start + width, i);
      }
      Pack<Float, kPack> grad_gate;
      Pack<Float, kPack> grad_up;
#pragma unroll
      for (int n = 0; n < kPack; ++n) {
        const Gradients found = gradients<kKind>(widen(grad.values[n]), widen(gate.values[n]),
                                                 widen(up.values[n]), prob);
        narrow(found.gate, grad_gate.values[n]);
        narrow(found.up, grad_up.values[n]);
        sum += found.prob;
      }
      store_pack(grad_x + start, i, grad_gate);
      if constexpr (kKind == Activation::kSwiglu) {
        store_pack(grad_x + start + width, i, grad_up);
      }
    }
    if (probs != nullptr) {  // the same for every thread
      sum = sum_over_row<kLanes>(sum, warp_sums);
      if (team.lane == 0) {
        grad_probs[row] = sum;
      }
    }
  }
}

// Rows of up to this many packs are left to a warp each.
constexpr int64_t kPacksOfWarp = 128;

template <Activation kKind>
void launch_forward(const ActivationParams& params, cudaStream_t stream) {
  const bool are_aligned = is_packed(params.x) && is_packed(params.y);
  with_float_type(params.type, are_aligned, params.width, [&]<typename Float, int kPack>() {
    const int lanes = lanes_for(params.width / kPack);
    launch("activate", activate_kernel<kKind, Float, kPack>,
           {.blocks = divided_up(params.rows, kRowThreads / lanes), .threads = kRowThreads}, stream,
           static_cast<const Float*>(params.x), params.probs, static_cast<Float*>(params.y),
           params.num_rows, params.rows, params.width, lanes);
  });
}

template <Activation kKind>
void launch_backward(const ActivationBackwardParams& params, cudaStream_t stream) {
  const bool are_aligned =
      is_packed(params.grad_y) && is_packed(params.x) && is_packed(params.grad_x);
  with_float_type(params.type, are_aligned, params.width, [&]<typename Float, int kPack>() {
    const bool is_short = params.width / kPack <= kPacksOfWarp;
    const int lanes = is_short ? kWarp : kRowThreads;
    launch("activate_backward",
           is_short ? activate_backward_kernel<kKind, Float, kPack, kWarp>
                    : activate_backward_kernel<kKind, Float, kPack, kRowThreads>,
           {.blocks = divided_up(params.rows, kRowThreads / lanes), .threads = kRowThreads}, stream,
           static_cast<const Float*>(params.grad_y), static_cast<const Float*>(params.x),
           params.probs, static_cast<Float*>(params.grad_x), params.grad_probs, params.num_rows,
           params.rows, params.width);
  });
}

void require_sizes(int64_t rows, int64_t width) {
  MC_REQUIRE(rows >= 0 && width >= 0, "a size is negative");
}

}  // namespace

void activate(const ActivationParams& params, cudaStream_t stream) {
  require_sizes(params.rows, params.width);
  if (params.rows == 0 || params.width == 0) {
    return;
  }
  if (params.kind == Activation::kSwiglu) {
    launch_forward<Activation::kSwiglu>(params, stream);
  } else {
    launch_forward<Activation::kGelu>(params, stream);
  }
}

void activate_backward(const ActivationBackwardParams& params, cudaStream_t stream) {
  require_sizes(params.rows, params.width);
  if (params.rows == 0) {
    return;  // a width of zero still has weights, whose gradient is zero
  }
  if (params.kind == Activation::kSwiglu) {
    launch_backward<Activation::kSwiglu>(params, stream);
  } else {
    launch_backward<Activation::kGelu>(params, stream);
  }
}

}  // namespace megacore::cuda
