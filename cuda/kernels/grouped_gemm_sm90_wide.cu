// Hopper, tiles of 128 x 256: two groups of warps share a tile, two blocks share the weights they
// load.

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ != 900 || !defined(__CUDA_ARCH_FEAT_SM90_ALL))
#error "compile this file for sm_90a alone: for any other target its kernels would be empty"
#endif

#include "grouped_gemm_cutlass.cuh"

namespace megacore::cuda {
namespace {

struct WideSm90 {
  using Arch = cutlass::arch::Sm90;
  using Tile = cute::Shape<cute::_128, cute::_256, cute::_64>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using KernelSchedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  using EpilogueSchedule = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
  static constexpr bool kHasWeightGrad = true;
};

}  // namespace

GroupedUnit grouped_unit_sm90_wide() {
  return {family_scratch_bytes<WideSm90>, launch_family<WideSm90>};
}

}  // namespace megacore::cuda
