// The operations of the CUDA module on emulated kernels, for CPU tensors, and its numbers.

#include <cstdint>
#include <string_view>

#include "gpu_operations.h"
#include "kernel_limits.h"
#include "megacore/cuda/peer_exchange.h"
#include "megacore/cuda/plan_offload.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Returns whether torch took them; their schemas are those of `name_space`.
EXPORTED bool megacore_register_emulated(const char* name_space) {
  return megacore::ops::register_gpu_kernels(name_space, "CPU");
}

// Returns -1 for an unknown name.
EXPORTED int64_t megacore_limit(const char* asked) {
  for (const auto& [name, limit] : megacore::cuda::kLimits) {
    if (name == std::string_view(asked)) {
      return limit;
    }
  }
  return -1;
}

EXPORTED int64_t megacore_peer_sort_numel(int64_t num_tokens,
                                          int64_t num_choices,
                                          int64_t num_experts) {
  return megacore::cuda::peer_sort_numel(num_tokens, num_choices, num_experts);
}

EXPORTED int64_t megacore_plan_offload_bytes(int64_t num_ranks,
                                             int64_t num_experts,
                                             int64_t num_spare_slots) {
  return megacore::cuda::plan_offload_bytes(
      {.num_ranks = num_ranks, .num_experts = num_experts, .num_spare_slots = num_spare_slots});
}
