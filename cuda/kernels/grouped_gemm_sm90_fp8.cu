// Hopper, factors of 8 bits in tiles of 128 x 128, each with a second sum in which the scales of a
// block of the depth are applied; two blocks, side by side, share the rows they load.

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ != 900 || !defined(__CUDA_ARCH_FEAT_SM90_ALL))
#error "compile this file for sm_90a alone: for any other target its kernels would be empty"
#endif

#include <algorithm>

#include "grouped_gemm_cutlass.cuh"

namespace megacore::cuda {
namespace {

using moe::GroupedProduct;

struct Fp8Sm90 {
  using Arch = cutlass::arch::Sm90;
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_128>;
  using Cluster = cute::Shape<cute::_1, cute::_2, cute::_1>;
  using KernelSchedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8Blockwise;
  using EpilogueSchedule = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};

// The gradient of the rows is a forward product, with weights transposed when they are rounded.
using Rows = GroupedKernel<Fp8Sm90, GroupedProduct::kForward, Float8, cutlass::bfloat16_t>;
using WeightGrad = GroupedKernel<Fp8Sm90, GroupedProduct::kWeightGrad, Float8, float>;

size_t scratch_bytes(int num_processors) {
  return std::max(Rows::scratch_bytes(num_processors), WeightGrad::scratch_bytes(num_processors));
}

void launch(const GroupedLaunch& launch) {
  if (launch.product == GroupedProduct::kForward) {
    Rows::run(launch);
  } else {
    WeightGrad::run(launch);
  }
}

}  // namespace

GroupedUnit grouped_unit_sm90_fp8() { return {scratch_bytes, launch}; }

}  // namespace megacore::cuda
