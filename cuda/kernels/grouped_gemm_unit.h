// What the translation units with CUTLASS kernels offer to the launcher. They are the slow part of
// the build, so each holds all kernels of one architecture and one family of tiles, and nothing of
// CUTLASS shows outside of them.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "megacore/cuda/grouped_gemm.h"
#include "megacore/moe/grouped_arguments.h"

namespace megacore::cuda {

// One product, its arguments per group lying on the device.
struct GroupedLaunch {
  moe::GroupedProduct product;
  GroupedType operand;
  GroupedType result;
  bool along_columns;
  int num_experts;
  moe::GroupedArguments arguments;
  void* scratch;       // tensor maps, written by the kernel; aligned to 256 bytes
  int device;          // the current device
  int num_processors;  // how many multiprocessors take part
  cudaStream_t stream;
};

// The kernels of one architecture and one family of tiles.
struct GroupedUnit {
  size_t (*scratch_bytes)(int num_processors);
  void (*launch)(const GroupedLaunch& launch);  // throws std::runtime_error if the launch fails
};

#if defined(MEGACORE_GROUPED_GEMM_SM90)
GroupedUnit grouped_unit_sm90_wide();
GroupedUnit grouped_unit_sm90_middle();
GroupedUnit grouped_unit_sm90_narrow();
GroupedUnit grouped_unit_sm90_square();
GroupedUnit grouped_unit_sm90_fp8();
#endif
#if defined(MEGACORE_GROUPED_GEMM_SM100)
GroupedUnit grouped_unit_sm100_wide();
#endif

}  // namespace megacore::cuda
