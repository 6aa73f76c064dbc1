#include "megacore/base/parallel_for.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <iterator>
#include <set>
#include <thread>
#include <vector>

namespace megacore::base {
namespace {

TEST(ParallelFor, CallsEveryIndexOnceForAnyGrainAndNumberOfThreads) {
  for (const int64_t count : {0, 1, 7, 64}) {
    for (const int64_t grain : {1, 3, 100}) {
      for (const int threads : {1, 2, 4}) {
        std::vector<std::atomic<int>> calls(static_cast<size_t>(count));
        parallel_for(count, grain, threads, [&](int64_t begin, int64_t end) {
          EXPECT_LE(end - begin, grain);
          for (int64_t i = begin; i < end; ++i) {
            ++calls[static_cast<size_t>(i)];
          }
        });
        for (const auto& number : calls) {
          EXPECT_EQ(number, 1);
        }
      }
    }
  }
}

struct Team {
  std::atomic<int> present = 0;
  pid_t ids[2] = {};

  // Both threads are there at the same time.
  static void meet(void* data) {
    auto& team = *static_cast<Team*>(data);
    team.ids[team.present.fetch_add(1)] = gettid();
    while (team.present < 2) {
      std::this_thread::yield();
    }
  }
};

TEST(ParallelFor, UsesTheThreadsOfTheLoadedOpenmpAgain) {
  if (dlopen("libgomp.so.1", RTLD_LAZY | RTLD_LOCAL) == nullptr) {
    GTEST_SKIP() << "needs libgomp.so.1";
  }
  std::set<pid_t> threads;
  for (int round = 0; round < 3; ++round) {
    Team team;
    run_team(2, Team::meet, &team);
    threads.insert(std::begin(team.ids), std::end(team.ids));
  }
  EXPECT_EQ(threads.size(), 2);  // the system gives every new thread another number
}

}  // namespace
}  // namespace megacore::base
