// Blackwell, tiles of 256 x 256 by pairs of multiprocessors.

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ != 1000 || !defined(__CUDA_ARCH_FEAT_SM100_ALL))
#error "compile this file for sm_100a alone: for any other target its kernels would be empty"
#endif

#include "grouped_gemm_cutlass.cuh"

namespace megacore::cuda {
namespace {

struct WideSm100 {
  using Arch = cutlass::arch::Sm100;
  using Tile = cute::Shape<cute::_256, cute::_256, cute::_64>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using KernelSchedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecialized2SmSm100;
  using EpilogueSchedule = cutlass::epilogue::PtrArrayTmaWarpSpecialized2Sm;
  static constexpr bool kHasWeightGrad = true;
};

}  // namespace

GroupedUnit grouped_unit_sm100_wide() {
  return {family_scratch_bytes<WideSm100>, launch_family<WideSm100>};
}

}  // namespace megacore::cuda
