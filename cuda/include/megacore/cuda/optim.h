// Optimizer kernels over flat shards.
//
// A launcher enqueues work on the given stream and returns: it neither allocates nor waits, so it
// may run under stream capture. Pointers are device pointers of the current device.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megacore/buffer/adamw_math.h"

namespace megacore::cuda {

// The CUDA twin of buffer::AdamWTensors; each holds `numel` elements and none overlaps another.
struct AdamWParams {
  float* param = nullptr;        // (numel) updated in place
  const float* grad = nullptr;   // (numel) read
  float* exp_avg = nullptr;      // (numel) first moment, updated in place
  float* exp_avg_sq = nullptr;   // (numel) second moment, updated in place
  uint16_t* copy_out = nullptr;  // (numel) optional: receives the new parameter, rounded
  bool copy_is_float16 = false;  // as float16, else as bfloat16
  int64_t numel = 0;
  buffer::AdamWOptions options = {};
  // Optional, on the device: overrules the options it has, and may call the step off.
  const buffer::StepControl* control = nullptr;
};

// One AdamW step; bit for bit the result of buffer::adamw_step on the same numbers. Moves four
// elements at a time when all pointers are aligned to 16 bytes (8 for copy_out).
// Throws std::runtime_error if the launch fails, e.g. on a device this build has no code for.
// REQUIRES: numel >= 0; the four fp32 pointers are set if numel > 0.
void adamw_step(const AdamWParams& params, cudaStream_t stream);

// buffer::decide_step on the device, with the bits of the CPU; `control` keeps its learning rate.
// All pointers are device pointers.
void decide_step(buffer::StepState* state,
                 const buffer::StepSums* sums,
                 buffer::StepControl* control,
                 const buffer::StepRules& rules,
                 cudaStream_t stream);

}  // namespace megacore::cuda
