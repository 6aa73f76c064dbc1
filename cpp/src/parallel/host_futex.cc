#include "host_futex.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#else
#include <algorithm>
#include <chrono>
#include <thread>
#endif

namespace megacore::parallel {

#if defined(__linux__)

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

void futex_wait(std::atomic<uint32_t>& word, uint32_t value, double limit_s) {
  timespec limit{};
  limit.tv_sec = static_cast<time_t>(limit_s);
  limit.tv_nsec = static_cast<long>((limit_s - static_cast<double>(limit.tv_sec)) * 1e9);
  // Not FUTEX_PRIVATE: the word lies in memory that several processes map.
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &limit, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

#else

void futex_wait(std::atomic<uint32_t>& word, uint32_t value, double limit_s) {
  if (word.load() == value) {
    const std::chrono::duration<double> nap(std::min(limit_s, 50e-6));
    std::this_thread::sleep_for(nap);
  }
}

void futex_wake_all(std::atomic<uint32_t>&) {}

#endif

}  // namespace megacore::parallel
