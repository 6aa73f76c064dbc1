// Splits a range over a few threads that live as long as the call.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace megacore::moe {

// Calls run(begin, end) for blocks of `grain` that cover [0, count). Starting and joining a thread
// costs some 20 us: `grain` should be worth at least that. Blocks go to whoever is free.
// REQUIRES: grain >= 1, num_threads >= 1, `run` does not throw.
template <typename Run>
void parallel_for(int64_t count, int64_t grain, int num_threads, const Run& run) {
  std::atomic<int64_t> next = 0;
  const auto work = [&run, &next, count, grain] {
    for (int64_t begin = next.fetch_add(grain); begin < count; begin = next.fetch_add(grain)) {
      run(begin, std::min(count, begin + grain));
    }
  };
  const int64_t num_helpers = std::min(int64_t{num_threads}, count / grain) - 1;
  std::vector<std::jthread> helpers;
  for (int64_t i = 0; i < num_helpers; ++i) {
    helpers.emplace_back(work);
  }
  work();
}

}  // namespace megacore::moe
