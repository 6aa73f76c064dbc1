// Hopper, tiles of 128 x 128: two groups of warps work on different tiles, so that reading and
// writing a result of one hides behind the sums of the other; two blocks, one above the other,
// share the columns' factor. For weight gradients of few rows and for results of few columns.

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ != 900 || !defined(__CUDA_ARCH_FEAT_SM90_ALL))
#error "compile this file for sm_90a alone: for any other target its kernels would be empty"
#endif

#include "grouped_gemm_cutlass.cuh"

namespace megacore::cuda {
namespace {

struct SquareSm90 {
  using Arch = cutlass::arch::Sm90;
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_64>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using KernelSchedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
  using EpilogueSchedule = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
  static constexpr bool kHasWeightGrad = true;
};

}  // namespace

GroupedUnit grouped_unit_sm90_square() {
  return {family_scratch_bytes<SquareSm90>, launch_family<SquareSm90>};
}

}  // namespace megacore::cuda
