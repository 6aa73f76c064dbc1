// Hopper, tiles of 128 x 256: two groups of warps share a tile; two blocks, side by side, share the
// rows they load. The second of two blocks is not wasted where an expert has few rows.

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ != 900 || !defined(__CUDA_ARCH_FEAT_SM90_ALL))
#error "compile this file for sm_90a alone: for any other target its kernels would be empty"
#endif

#include "grouped_gemm_cutlass.cuh"

namespace megacore::cuda {
namespace {

struct MiddleSm90 {
  using Arch = cutlass::arch::Sm90;
  using Tile = cute::Shape<cute::_128, cute::_256, cute::_64>;
  using Cluster = cute::Shape<cute::_1, cute::_2, cute::_1>;
  using KernelSchedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  using EpilogueSchedule = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
  static constexpr bool kHasWeightGrad = false;
};

}  // namespace

GroupedUnit grouped_unit_sm90_middle() {
  return {family_scratch_bytes<MiddleSm90>, launch_family<MiddleSm90>};
}

}  // namespace megacore::cuda
