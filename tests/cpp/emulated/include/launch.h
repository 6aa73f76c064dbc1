// Stands in for cuda/kernels/launch.h: runs a kernel on the CPU and returns when it is done.

#pragma once

#include <cstdint>

#include "cuda_runtime_api.h"
#include "megacore/cuda/check.h"

namespace megacore::cuda {

struct LaunchShape {
  int64_t blocks = 1;
  int threads = 256;
  int64_t block_rows = 1;
  int64_t shared_bytes = 0;
};

// Every second block runs its threads in the opposite order: a kernel that lacks a barrier reads
// values before they are written in one of them.
inline void run_block(const LaunchShape& shape, dim3 block, const auto& body) {
  emulated::Block shared(shape.threads, shape.shared_bytes);
  emulated::block = &shared;
  blockIdx = block;
  gridDim = {.x = static_cast<unsigned>(shape.blocks),
             .y = static_cast<unsigned>(shape.block_rows),
             .z = 1};
  static thread_local bool reverse = false;
  reverse = !reverse;
  emulated::Fibers::run(shape.threads, reverse, [&](int thread) {
    threadIdx = {.x = static_cast<unsigned>(thread), .y = 0, .z = 0};
    body();
  });
}

template <typename... Params, typename... Args>
void launch(const char*,
            void (*kernel)(Params...),
            const LaunchShape& shape,
            cudaStream_t,
            const Args&... args) {
  for (int64_t y = 0; y < shape.block_rows; ++y) {
    for (int64_t x = 0; x < shape.blocks; ++x) {
      run_block(shape, {.x = static_cast<unsigned>(x), .y = static_cast<unsigned>(y), .z = 0},
                [&] { kernel(args...); });
    }
  }
}

inline int64_t divided_up(int64_t amount, int64_t unit) { return (amount + unit - 1) / unit; }

}  // namespace megacore::cuda
