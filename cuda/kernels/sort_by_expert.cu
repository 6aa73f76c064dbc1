// A stable counting sort by expert in two launches, see sort_tiles.cuh.

#include "sort_tiles.cuh"

namespace megacore::cuda {
namespace {

__global__ void __launch_bounds__(sorting::kThreads) count_kernel(SortParams params, int64_t tile) {
  sorting::count_block(params, tile);
}

__global__ void __launch_bounds__(sorting::kThreads) place_kernel(SortParams params, int64_t tile) {
  sorting::place_block(params, tile);
}

}  // namespace

int64_t sort_workspace_numel(int64_t numel, int64_t num_experts) {
  return sorting::workspace_numel(numel, 1, num_experts);
}

void sort_by_expert(const SortParams& params, cudaStream_t stream) {
  MC_REQUIRE(params.numel >= 0 && params.numel < (int64_t{1} << 31),
             "{} copies; the kernel sorts fewer than 2^31", params.numel);
  MC_REQUIRE(params.num_experts >= 1 && params.num_experts <= kMaxSortedExperts,
             "{} experts; the kernel sorts by 1 to {}", params.num_experts, kMaxSortedExperts);
  const sorting::Tiling tiling = sorting::tiling_of(params.numel, 1);
  const LaunchShape shape{.blocks = tiling.tiles, .threads = sorting::kThreads};
  launch("sort_by_expert", count_kernel, shape, stream, params, tiling.tile);
  launch("sort_by_expert", place_kernel, shape, stream, params, tiling.tile);
}

}  // namespace megacore::cuda
