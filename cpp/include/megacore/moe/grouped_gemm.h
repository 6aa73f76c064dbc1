// Grouped matrix products on the CPU: every expert multiplies its rows by its weight.
//
//   rows of x:  [ expert 0 | expert 1 | ... | rows of nobody ]      m_splits[e] rows each
//   y = x w^T per expert, and its two derivatives
//
// Factors may be fp32, bfloat16 or float16; sums are formed in fp32 and rounded once, where the
// result is narrower. Elements are widened where a block is packed, so narrow factors cost no
// memory beside their own and hardly any time, also on processors without instructions for them.
//
// Blocked for the caches, with a register tile of the CPU's vector width; no BLAS. All experts
// share one list of tasks, so that a few large groups or many small ones keep every thread busy.
// The sum of each element has the same order for any number of threads.
//
// All matrices are row-major and contiguous. Padding rows are not read. In results that have rows
// they are zero, or not written without `clear_padding`.

#pragma once

#include <cstdint>

namespace megacore::moe {

enum class NumberFormat : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Start of a matrix that is read.
struct Source {
  Source(const float* data) : data(data), format(NumberFormat::kFloat32) {}
  Source(const void* data, NumberFormat format) : data(data), format(format) {}

  const void* data;
  NumberFormat format;
};

// Start of a matrix that is written.
struct Target {
  Target(float* data) : data(data), format(NumberFormat::kFloat32) {}
  Target(void* data, NumberFormat format) : data(data), format(format) {}

  void* data;
  NumberFormat format;
};

struct GroupedShape {
  int64_t num_rows;      // M, of all experts and of nobody
  int64_t num_experts;   // E
  int64_t out_features;  // N
  int64_t in_features;   // K
};

// y[rows of e] = x[rows of e] w[e]^T: x (M, K), w (E, N, K), y (M, N).
// REQUIRES: every m_splits[e] >= 0, their sum <= M, num_threads >= 1.
void grouped_gemm(Source x,
                  Source w,
                  const int64_t* m_splits,
                  Target y,
                  const GroupedShape& shape,
                  bool clear_padding,
                  int num_threads);

// grad_x[rows of e] = grad_y[rows of e] w[e]: grad_y (M, N), grad_x (M, K). REQUIRES: as above.
void grouped_gemm_input_grad(Source grad_y,
                             Source w,
                             const int64_t* m_splits,
                             Target grad_x,
                             const GroupedShape& shape,
                             bool clear_padding,
                             int num_threads);

// grad_w[e] (+)= grad_y[rows of e]^T x[rows of e]: grad_w (E, N, K). Without `accumulate` the
// gradient of an expert without rows is set to zero. REQUIRES: as above; fp32 to accumulate.
void grouped_gemm_weight_grad(Source grad_y,
                              Source x,
                              const int64_t* m_splits,
                              Target grad_w,
                              const GroupedShape& shape,
                              bool accumulate,
                              int num_threads);

}  // namespace megacore::moe
