// Splits a range over the threads of the process's OpenMP runtime.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace megacore::base {

// Calls work(data) in up to `num_threads` threads at the same time, of which the calling one is
// the first, and returns when all calls have. The threads are those of the OpenMP runtime that the
// process has loaded, which torch's operations use too: its idle threads spin for a while, and
// threads of our own would have to share the cores with them. Without OpenMP, threads are started.
// REQUIRES: num_threads >= 1, `work` does not throw and is correct for any number of calls.
void run_team(int num_threads, void (*work)(void*), void* data);

// Calls run(begin, end) for blocks of `grain` that cover [0, count). Waking threads costs
// microseconds: `grain` should be worth more than that. A thread that is free takes the next block.
// REQUIRES: grain >= 1, num_threads >= 1, `run` does not throw.
template <typename Run>
void parallel_for(int64_t count, int64_t grain, int num_threads, const Run& run) {
  struct Blocks {
    const Run& run;
    int64_t count;
    int64_t grain;
    std::atomic<int64_t> next = 0;
  };
  Blocks blocks{.run = run, .count = count, .grain = grain};
  const auto work = [](void* data) {
    auto& b = *static_cast<Blocks*>(data);
    for (int64_t begin = b.next.fetch_add(b.grain); begin < b.count;
         begin = b.next.fetch_add(b.grain)) {
      b.run(begin, std::min(b.count, begin + b.grain));
    }
  };
  run_team(count >= 2 * grain ? num_threads : 1, work, &blocks);
}

}  // namespace megacore::base
