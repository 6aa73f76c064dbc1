// Operations that a module implements, under their names in torch, and their registration.

#pragma once

#include <span>

#include "operations.h"

namespace megacore::ops {

struct Kernel {
  const char* name;
  StableKernel run;
};

// Those of both devices: the functions of operations.h in the module that includes this.
inline constexpr Kernel kKernels[] = {
    {"_rms_norm", kernel_of<rms_norm>},
    {"_add_rms_norm", kernel_of<add_rms_norm>},
    {"_rms_norm_backward", kernel_of<rms_norm_backward>},
    {"_swiglu", kernel_of<activate<moe::Activation::kSwiglu>>},
    {"_swiglu_backward", kernel_of<activate_backward<moe::Activation::kSwiglu>>},
    {"_gelu", kernel_of<activate<moe::Activation::kGelu>>},
    {"_gelu_backward", kernel_of<activate_backward<moe::Activation::kGelu>>},
    {"_sort_by_expert", kernel_of<sort_by_expert>},
    {"_permute", kernel_of<permute>},
    {"_unpermute", kernel_of<unpermute>},
    {"_permute_both", kernel_of<permute_both>},
    {"_unpermute_both", kernel_of<unpermute_both>},
    {"_row_dots", kernel_of<row_dots>},
    {"_top_k", kernel_of<top_k>},
    {"_split_and_rotate", kernel_of<split_and_rotate>},
    {"_split_and_rotate_backward", kernel_of<split_and_rotate_backward>},
    {"_norm_and_rotate", kernel_of<norm_and_rotate>},
    {"_norm_and_rotate_backward", kernel_of<norm_and_rotate_backward>},
    {"_quantize_rows", kernel_of<quantize_rows>},
    {"_quantize_columns", kernel_of<quantize_columns>},
    {"_quantize_blocks_", kernel_of<quantize_blocks>},
    {"_adamw_step_", kernel_of<adamw_step>},
    {"_decide_step_", kernel_of<decide_step>},
    {"_sum_of_squares", kernel_of<sum_of_squares>},
    {"_plan_offload", kernel_of<plan_offload>},
    {"_reroute", kernel_of<reroute>},
    {"_count_plan_", kernel_of<count_plan>},
    {"_count_held_", kernel_of<count_held>},
    {"_route", kernel_of<route>},
    {"_route_backward", kernel_of<route_backward>},
    {"_counter_dropout", kernel_of<counter_dropout>},
};

// The version whose C interface these sources use, as torch writes it: 2.11.
inline constexpr uint64_t kTorchVersion = (uint64_t{2} << 56) | (uint64_t{11} << 48);

// Registers ranges of Kernel for a dispatch key; returns whether torch took all. They stay
// registered until the process ends.
template <typename... Kernels>
bool register_for(const char* name_space, const char* dispatch_key, const Kernels&... kernels) {
  TorchLibraryHandle library = nullptr;
  if (aoti_torch_library_init_impl(name_space, dispatch_key, __FILE__, __LINE__, &library) != 0) {
    return false;
  }
  const auto take = [library](const Kernel& kernel) {
    return torch_library_impl(library, kernel.name, kernel.run, kTorchVersion) == 0;
  };
  return (std::ranges::all_of(kernels, take) && ...);
}

// The same of kKernels, and of `others` beside them.
template <typename... Others>
bool register_kernels(const char* name_space, const char* dispatch_key, const Others&... others) {
  return register_for(name_space, dispatch_key, kKernels, others...);
}

}  // namespace megacore::ops
