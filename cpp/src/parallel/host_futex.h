// Sleeping until a word of shared memory changes. On Linux a futex, elsewhere a short nap.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

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

// How often a waiting member looks whether the others still live, in seconds.
constexpr double kLookEveryS = 0.1;

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Whether `is_over` becomes true before it pays to sleep. A member that waits looks a few times,
// then offers its core to others for a while. Offering lets peers run that have no core of their
// own, and spares a core without other work the way into sleep and back, which takes longer than
// most waits. On a core with other work an offer costs a time slice of that work, while the
// scheduler runs a woken sleeper at once: after a long offer, the next waits sleep without one.
template <typename IsOver>
bool is_soon(const IsOver& is_over) {
  constexpr int kNumLooks = 10;
  constexpr std::chrono::microseconds kOffer(50);
  constexpr std::chrono::microseconds kLongOffer(200);
  constexpr int kNumWithoutOffer = 64;
  static thread_local int num_without_offer = 0;
  for (int look = 0; look < kNumLooks; ++look) {
    if (is_over()) {
      return true;
    }
    pause_processor();
  }
  if (num_without_offer > 0) {
    --num_without_offer;
    return false;
  }
  const auto start = std::chrono::steady_clock::now();
  while (!is_over()) {
    const auto waited = std::chrono::steady_clock::now() - start;
    if (waited > kLongOffer) {
      num_without_offer = kNumWithoutOffer;
    }
    if (waited > kOffer) {
      return false;
    }
    std::this_thread::yield();
  }
  return true;
}

}  // namespace megacore::parallel
