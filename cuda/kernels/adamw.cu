// AdamW is bound by memory: 28 bytes move per element for some ten operations. The kernel therefore
// only has to keep enough wide loads in flight; the arithmetic is that of the CPU, one element at a
// time.

#include "launch.h"
#include "megacore/cuda/optim.h"

namespace megacore::cuda {
namespace {

constexpr int kThreads = 256;
// More blocks than any device runs at once; each block then walks the array in strides.
constexpr int64_t kMaxBlocks = 4096;

__device__ __forceinline__ void step_one(const AdamWParams& p,
                                         const buffer::AdamWScalars& scalars,
                                         int64_t i) {
  const buffer::AdamWElement next =
      buffer::adamw_element({p.param[i], p.exp_avg[i], p.exp_avg_sq[i]}, p.grad[i], scalars);
  p.param[i] = next.param;
  p.exp_avg[i] = next.exp_avg;
  p.exp_avg_sq[i] = next.exp_avg_sq;
  if (p.copy_out != nullptr) {
    p.copy_out[i] = buffer::copied_bits(next.param, p.copy_is_float16);
  }
}

__device__ __forceinline__ void step_four(const AdamWParams& p,
                                          const buffer::AdamWScalars& scalars,
                                          int64_t i) {
  float4 param = reinterpret_cast<float4*>(p.param)[i];
  float4 exp_avg = reinterpret_cast<float4*>(p.exp_avg)[i];
  float4 exp_avg_sq = reinterpret_cast<float4*>(p.exp_avg_sq)[i];
  const float4 grad = __ldg(reinterpret_cast<const float4*>(p.grad) + i);
  const auto step = [&](float& value, float g, float& m, float& v) {
    const buffer::AdamWElement next = buffer::adamw_element({value, m, v}, g, scalars);
    value = next.param;
    m = next.exp_avg;
    v = next.exp_avg_sq;
  };
  step(param.x, grad.x, exp_avg.x, exp_avg_sq.x);
  step(param.y, grad.y, exp_avg.y, exp_avg_sq.y);
  step(param.z, grad.z, exp_avg.z, exp_avg_sq.z);
  step(param.w, grad.w, exp_avg.w, exp_avg_sq.w);
  reinterpret_cast<float4*>(p.param)[i] = param;
  reinterpret_cast<float4*>(p.exp_avg)[i] = exp_avg;
  reinterpret_cast<float4*>(p.exp_avg_sq)[i] = exp_avg_sq;
  if (p.copy_out != nullptr) {
    const bool is_float16 = p.copy_is_float16;
    reinterpret_cast<ushort4*>(p.copy_out)[i] = {
        buffer::copied_bits(param.x, is_float16), buffer::copied_bits(param.y, is_float16),
        buffer::copied_bits(param.z, is_float16), buffer::copied_bits(param.w, is_float16)};
  }
}

// Elements [0, 4 * num_vectors) four at a time, the rest one at a time.
__global__ void __launch_bounds__(kThreads) adamw_kernel(AdamWParams params, int64_t num_vectors) {
  // Once per block: the factors take divisions and roots in fp64.
  __shared__ buffer::AdamWScalars scalars;
  if (params.control != nullptr && params.control->is_applied == 0.0) {
    return;  // the same for every thread
  }
  if (threadIdx.x == 0) {
    const buffer::AdamWOptions& options = params.options;
    scalars = buffer::adamw_scalars(
        params.control == nullptr ? options : buffer::controlled(options, *params.control));
  }
  __syncthreads();
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = thread; i < num_vectors; i += stride) {
    step_four(params, scalars, i);
  }
  for (int64_t i = 4 * num_vectors + thread; i < params.numel; i += stride) {
    step_one(params, scalars, i);
  }
}

__global__ void decide_kernel(buffer::StepState* state,
                              const buffer::StepSums* sums,
                              buffer::StepControl* control,
                              buffer::StepRules rules) {
  *control = buffer::decide_step(*state, rules, *sums, control->lr);
}

bool is_aligned(const void* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

bool allows_vectors(const AdamWParams& p) {
  return is_aligned(p.param, sizeof(float4)) && is_aligned(p.grad, sizeof(float4)) &&
         is_aligned(p.exp_avg, sizeof(float4)) && is_aligned(p.exp_avg_sq, sizeof(float4)) &&
         is_aligned(p.copy_out, sizeof(ushort4));
}

}  // namespace

void adamw_step(const AdamWParams& params, cudaStream_t stream) {
  if (params.numel == 0) {
    return;  // a grid of no blocks is an error
  }
  const int64_t num_vectors = allows_vectors(params) ? params.numel / 4 : 0;
  const int64_t work = num_vectors > 0 ? num_vectors : params.numel;
  const int64_t blocks = std::min(divided_up(work, kThreads), kMaxBlocks);
  launch("adamw_step", adamw_kernel, {.blocks = blocks, .threads = kThreads}, stream, params,
         num_vectors);
}

void decide_step(buffer::StepState* state,
                 const buffer::StepSums* sums,
                 buffer::StepControl* control,
                 const buffer::StepRules& rules,
                 cudaStream_t stream) {
  launch("decide_step", decide_kernel, {.threads = 1}, stream, state, sums, control, rules);
}

}  // namespace megacore::cuda
