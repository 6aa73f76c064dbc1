// Operations for GPUs alone.

#pragma once

#include <span>

#include "kernels.h"

namespace megacore::ops {

// Writes a grouped product into `out`; see cuda/grouped_gemm.h. `product`, `tile` and
// `along_columns` are its enumerators and order of tiles. Weights (E, N, K) are `b`, or `out` in a
// weight gradient. `num_rows` is M, which does not follow from the shape of transposed 8-bit
// columns.
void grouped_gemm_(Tensor a,
                   Tensor b,
                   std::optional<Tensor> m_splits,
                   Tensor out,
                   int64_t product,
                   std::optional<Tensor> a_scale,
                   std::optional<Tensor> b_scale,
                   int64_t num_rows,
                   bool accumulate,
                   std::optional<Tensor> mask,
                   bool clear_tail,
                   std::optional<Tensor> first_row,
                   int64_t expected_rows,
                   int64_t tile,
                   bool along_columns);

// Exchanges in the memory of peers; their schemas and what the arguments are:
// python/megacore/ops/peer_exchange.py and clone_exchange.py.
std::span<const Kernel> peer_kernels();
std::span<const Kernel> clone_kernels();

// Registers all operations that GPUs have; see register_kernels.
inline bool register_gpu_kernels(const char* name_space, const char* dispatch_key) {
  constexpr Kernel kProducts[] = {{"_grouped_gemm_", kernel_of<grouped_gemm_>}};
  return register_kernels(name_space, dispatch_key, kProducts, peer_kernels(), clone_kernels());
}

}  // namespace megacore::ops
