// Grouped matrix products in bf16 and fp16 on sm_90 and sm_100, and of 8-bit floats with scales on
// sm_90: every expert multiplies its own rows by its own weight. The counts of rows stay on the
// device.
//
// A call is two kernels: a small one works out the arguments of each group from the counts (see
// moe/grouped_arguments.h) and clears what no product writes; a persistent CUTLASS kernel computes
// all groups. Neither allocates nor waits, so both may run under stream capture, and a graph may be
// replayed with other counts.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "megacore/moe/grouped_arguments.h"

namespace megacore::cuda {

// kFloat8 is e4m3 with a scale per block, see moe/fp8.h. Its products are kForward, with scales of
// rows and blocks, into bf16, and kWeightGrad, with transposed columns, into float32.
enum class GroupedType : int32_t { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2, kFloat8 = 3 };

// Families of tiles, rows x columns of the result. Each exists on sm_90; sm_100 has kWide only,
// with 256 x 256, and takes it whatever is asked for. Weight gradients take kSquare or kWide.
enum class GroupedTile : int32_t {
  kAuto = 0,    // what choose_grouped_plan says
  kWide = 1,    // 128 x 256; two blocks, one above the other, share the columns' factor
  kMiddle = 2,  // 128 x 256; two blocks, side by side, share the rows' factor
  kNarrow = 3,  // 64 x 256, for groups of few rows
  kSquare = 4,  // 128 x 128; a tile is written while another is computed
};

// How a product is computed. The order in which tiles are walked through decides what neighbours
// find in the cache.
struct GroupedPlan {
  GroupedTile tile = GroupedTile::kAuto;
  bool along_columns = false;  // else down the rows first
};

struct GroupedGemmParams {
  moe::GroupedProduct product = moe::GroupedProduct::kForward;
  const void* a = nullptr;         // x (M, K), or dy (M, N) in both gradients
  const void* b = nullptr;         // w (E, N, K), or x (M, K) in the weight gradient
  const float* a_scale = nullptr;  // of factors of 8 bits
  const float* b_scale = nullptr;
  // (E) rows per expert, read on the device; without it one expert has all rows.
  const int64_t* m_splits = nullptr;
  // Where the rows of the first expert begin, read on the device; without it the first row. What
  // comes before is neither read nor written.
  const int64_t* first_row = nullptr;
  void* d = nullptr;  // y (M, N), dx (M, K) or dw (E, N, K)
  GroupedType operand = GroupedType::kBFloat16;
  GroupedType result = GroupedType::kBFloat16;  // `operand`, or float32 for dw
  int64_t num_rows = 0;
  // Of an expert; chooses the tiles where num_rows is a capacity. 0: num_rows / num_experts.
  int64_t expected_rows = 0;
  int64_t num_experts = 0;
  int64_t out_features = 0;
  int64_t in_features = 0;
  // Weight gradient into float32 only: add to dw. With a mask, each expert as its entry says.
  bool accumulate = false;
  const uint8_t* accumulate_mask = nullptr;  // (E), on the device, optional
  // Set the rows of nobody to zero (forward and input gradient); otherwise they are not written.
  bool clear_tail = false;
  GroupedPlan plan = {};  // kAuto: as choose_grouped_plan says; factors of 8 bits have no choice
  void* workspace = nullptr;  // aligned to 256 bytes, used by no other call that may run meanwhile
  size_t workspace_bytes = 0;
};

// Architectures whose kernels this build holds: "90a", "100a". Empty without CUTLASS's headers.
std::vector<std::string> grouped_gemm_archs();

// What a workspace must hold on the current device, for any product and any tile.
// Throws std::runtime_error if the device or the build has no kernel.
size_t grouped_gemm_workspace_bytes(int64_t num_experts);

// The plan of a product on a device of capability `major`.0: the first rule of a table that fits.
// `expected_rows` as in GroupedGemmParams.
GroupedPlan choose_grouped_plan(const moe::GroupedProblem& problem,
                                int64_t expected_rows,
                                int major);

// Runs the product on `stream`. Throws std::invalid_argument if a size, type or address does not
// fit, std::runtime_error if the device or the build has no kernel or the launch fails.
void grouped_gemm(const GroupedGemmParams& params, cudaStream_t stream);

// Only the first kernel: leaves the arguments of the groups at the start of the workspace.
void grouped_gemm_set_up(const GroupedGemmParams& params, cudaStream_t stream);

}  // namespace megacore::cuda
