// Queues a kernel and turns a failed launch into an exception.

#pragma once

#include <algorithm>
#include <cstdint>

#include "megacore/cuda/check.h"

namespace megacore::cuda {

inline constexpr int64_t kMaxGridBlocks = (int64_t{1} << 31) - 1;

struct LaunchShape {
  int64_t blocks = 1;
  int threads = 256;
  int64_t block_rows = 1;    // second dimension of the grid, at most 65535
  int64_t shared_bytes = 0;  // dynamic shared memory of a block
};

// `name` is the operation as a message calls it. REQUIRES: at least one block.
template <typename... Params, typename... Args>
void launch(const char* name,
            void (*kernel)(Params...),
            const LaunchShape& shape,
            cudaStream_t stream,
            const Args&... args) {
  const dim3 grid(static_cast<unsigned>(std::min(shape.blocks, kMaxGridBlocks)),
                  static_cast<unsigned>(shape.block_rows));
  kernel<<<grid, static_cast<unsigned>(shape.threads), static_cast<size_t>(shape.shared_bytes),
           stream>>>(args...);
  check(cudaGetLastError(), "launching {}", name);
}

inline int64_t divided_up(int64_t amount, int64_t unit) { return (amount + unit - 1) / unit; }

}  // namespace megacore::cuda
