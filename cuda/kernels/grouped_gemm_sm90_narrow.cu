// Hopper, tiles of 64 rows: experts with few rows waste less of a tile. Two groups of warps work on
// different tiles, so that the end of one hides behind the middle of the other.

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ != 900 || !defined(__CUDA_ARCH_FEAT_SM90_ALL))
#error "compile this file for sm_90a alone: for any other target its kernels would be empty"
#endif

#include "grouped_gemm_cutlass.cuh"

namespace megacore::cuda {
namespace {

struct NarrowSm90 {
  using Arch = cutlass::arch::Sm90;
  using Tile = cute::Shape<cute::_64, cute::_256, cute::_64>;
  using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using KernelSchedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
  using EpilogueSchedule = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
  static constexpr bool kHasWeightGrad = false;
};

}  // namespace

GroupedUnit grouped_unit_sm90_narrow() {
  return {family_scratch_bytes<NarrowSm90>, launch_family<NarrowSm90>};
}

}  // namespace megacore::cuda
