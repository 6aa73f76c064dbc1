// Stands in for cuda/kernels/system_memory.cuh, with what else kernels need that talk to others.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "cuda_runtime_api.h"

inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __nanosleep(unsigned) {
  const dim3 mine = threadIdx;
  emulated::Fibers::yield();
  threadIdx = mine;
  std::this_thread::yield();  // to other ranks
}

template <typename T>
T atomicCAS(T* at, T expected, T value) {
  std::atomic_ref<T>(*at).compare_exchange_strong(expected, value);
  return expected;
}

inline int __syncthreads_and(bool is) {
  bool& all = emulated::block->vote;
  __syncthreads();
  all = true;
  __syncthreads();
  if (!is) {
    all = false;
  }
  __syncthreads();
  const bool result = all;
  __syncthreads();
  return result ? 1 : 0;
}

namespace megacore::cuda {

inline uint32_t load_acquire(const uint32_t* flag) {
  return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(flag)).load(std::memory_order_acquire);
}
inline void store_release(uint32_t* flag, uint32_t value) {
  std::atomic_ref<uint32_t>(*flag).store(value, std::memory_order_release);
}
inline uint64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::nanoseconds(now).count());
}

}  // namespace megacore::cuda
