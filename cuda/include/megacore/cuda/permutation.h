// Moves tokens into expert order and back: the CUDA twins of megacore/moe/permutation.h.
//
// A launcher enqueues work on the given stream and returns: it neither allocates nor waits, so it
// may run under stream capture. Pointers are device pointers of the current device. Results do not
// depend on timing: integers and copies have the bits of the CPU, sums a fixed order of their own.
//
// Kernels cannot report a bad index. An expert or a row that is out of range counts as a copy that
// does not exist (-1): it is not read, and nothing is written for it.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megacore/cuda/float_type.h"

namespace megacore::cuda {

inline constexpr int64_t kMaxSortedExperts = 512;

struct SortParams {
  const int64_t* expert_of = nullptr;    // (numel) in token order, -1 for no copy
  int64_t numel = 0;                     // below 2^31
  int64_t num_experts = 0;               // [1, kMaxSortedExperts]
  int64_t* row_map = nullptr;            // (numel) written: row of each copy, or -1
  int64_t* tokens_per_expert = nullptr;  // (num_experts) written
  int32_t* workspace = nullptr;          // (sort_workspace_numel) overwritten
};

// Elements of the workspace that `sort_by_expert` needs.
int64_t sort_workspace_numel(int64_t numel, int64_t num_experts);

// Rows sorted by expert, then by position. Throws std::invalid_argument where a size is out of
// range, std::runtime_error if a launch fails.
void sort_by_expert(const SortParams& params, cudaStream_t stream);

struct RowMap {
  const int64_t* rows = nullptr;  // (num_tokens, num_choices), each row at most once, -1 for none
  int64_t num_tokens = 0;
  int64_t num_choices = 0;
  int64_t num_rows = 0;
  int64_t width = 0;  // elements of a row
};

struct PermuteParams {
  const void* tokens = nullptr;    // (num_tokens, width)
  const float* weights = nullptr;  // (num_tokens, num_choices) optional
  void* rows = nullptr;            // (num_rows, width) written everywhere
  uint8_t* is_written = nullptr;   // (num_rows) workspace, overwritten
  RowMap map = {};
  FloatType type = FloatType::kFloat32;
};

// rows[map[t][j]] = weights[t][j] * tokens[t], all other rows zero.
void permute(const PermuteParams& params, cudaStream_t stream);

struct UnpermuteParams {
  const void* rows = nullptr;      // (num_rows, width) read where the map points
  const float* weights = nullptr;  // (num_tokens, num_choices) optional
  void* tokens = nullptr;          // (num_tokens, width) written
  RowMap map = {};
  FloatType type = FloatType::kFloat32;
};

// tokens[t] = sum over j of weights[t][j] * rows[map[t][j]], summed in fp32 in the order of j.
void unpermute(const UnpermuteParams& params, cudaStream_t stream);

struct RowDotsParams {
  const void* tokens = nullptr;  // (num_tokens, width)
  const void* rows = nullptr;    // (num_rows, width) read where the map points
  float* dots = nullptr;         // (num_tokens, num_choices) written
  RowMap map = {};
  FloatType type = FloatType::kFloat32;
};

// dots[t][j] = tokens[t] . rows[map[t][j]], 0 where no copy lies.
void row_dots(const RowDotsParams& params, cudaStream_t stream);

}  // namespace megacore::cuda
