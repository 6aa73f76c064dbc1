// Sleeping until a word of shared memory changes. On Linux a futex, elsewhere a short nap.

#pragma once

#include <atomic>
#include <cstdint>

namespace megacore::parallel {

// Sleeps while `word` equals `value`: until futex_wake_all, a signal, or `limit_s` has passed. May
// return early.
void futex_wait(std::atomic<uint32_t>& word, uint32_t value, double limit_s);

// Wakes all that sleep on `word`, in any process.
void futex_wake_all(std::atomic<uint32_t>& word);

// Tells the processor that this is a loop that waits.
inline void pause_processor() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace megacore::parallel
