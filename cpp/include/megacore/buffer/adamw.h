// AdamW over a contiguous run of fp32 elements, and the sum of squares for gradient clipping.
//
// A data-parallel rank updates its shard with one call per run of elements with the same settings.
// Results depend neither on the number of threads nor on the vector width of the CPU.

#pragma once

#include <cstdint>

#include "megacore/buffer/adamw_math.h"

namespace megacore::buffer {

// The tensors of one call, `numel` elements each, without overlap.
struct AdamWTensors {
  float* param = nullptr;        // updated in place
  const float* grad = nullptr;   // read
  float* exp_avg = nullptr;      // first moment, updated in place
  float* exp_avg_sq = nullptr;   // second moment, updated in place
  uint16_t* copy_out = nullptr;  // optional: receives the new parameter, rounded to nearest even
  bool copy_is_float16 = false;  // as float16 (infinity from 65520 on), else as bfloat16
  int64_t numel = 0;
};

// One AdamW step, see adamw_element. Uses up to `num_threads` threads if the run is long enough; no
// thread outlives the call.
// Throws std::invalid_argument for a missing tensor, a negative size, zero threads, a bias
// correction that is not positive, or a beta outside [0, 1).
void adamw_step(const AdamWTensors& tensors, const AdamWOptions& options, int num_threads = 1);

// Sum of values[i]^2 in fp64, in an order that depends on `numel` only. A square of an fp32 number
// is exact in fp64, so the result is not finite exactly if some element is not finite.
// REQUIRES: numel >= 0.
double sum_of_squares(const float* values, int64_t numel);

}  // namespace megacore::buffer
