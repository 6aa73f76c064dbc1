#include "megacore/parallel/host_window.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

namespace megacore::parallel {
namespace {

struct Shape {
  int size = 2;
  int64_t bytes = 4096;
  int64_t num_parts = 2;
  double timeout_s = 20.0;
};

HostCommConfig config_of(const Shape& shape, int position) {
  HostCommConfig config;
  config.position = position;
  config.timeout_s = shape.timeout_s;
  for (int p = 0; p < shape.size; ++p) {
    config.ranks.push_back(10 + p);
  }
  return config;
}

// Runs `member` in one thread per position, with windows over the same plain memory; returns what
// each threw, or "".
std::vector<std::string> run_threads(const Shape& shape,
                                     const std::function<void(HostWindow&, int)>& member) {
  const int64_t bytes = HostWindow::segment_bytes(shape.bytes, shape.num_parts);
  std::vector<std::vector<std::byte>> memory(static_cast<size_t>(shape.size));
  std::vector<std::unique_ptr<HostWindow>> windows;
  std::vector<std::byte*> starts;
  for (auto& own : memory) {
    own.resize(static_cast<size_t>(bytes) + 64);
    const auto address = reinterpret_cast<uintptr_t>(own.data());
    starts.push_back(own.data() + (64 - address % 64) % 64);
  }
  for (int p = 0; p < shape.size; ++p) {
    std::vector<HostSegment> segments;
    for (std::byte* start : starts) {
      segments.push_back(HostSegment::over(start, bytes));
    }
    windows.push_back(
        std::make_unique<HostWindow>(std::move(segments), shape.num_parts, config_of(shape, p)));
  }
  std::vector<std::string> errors(windows.size());
  std::vector<std::thread> threads;
  for (int p = 0; p < shape.size; ++p) {
    threads.emplace_back([&, p] {
      try {
        member(*windows[static_cast<size_t>(p)], p);
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(p)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return errors;
}

float* floats(HostWindow& window) { return reinterpret_cast<float*>(window.data()); }

TEST(HostWindow, ReduceScatterAndAllGatherInTurns) {
  for (const int size : {2, 3, 5}) {
    const int64_t numel = 96;  // per member
    const Shape shape = {.size = size, .bytes = 2 * size * numel * 4, .num_parts = 2};
    const auto errors = run_threads(shape, [&](HostWindow& window, int position) {
      for (int round = 0; round < 50; ++round) {
        for (int64_t part = 0; part < 2; ++part) {
          window.wait_until_taken(part);
          float* const values = floats(window) + part * size * numel;
          for (int64_t i = 0; i < size * numel; ++i) {
            values[i] = static_cast<float>(round + position + i % 7);
          }
          window.offer(part);
        }
        for (int64_t part = 0; part < 2; ++part) {
          const HostWindow::Task task = {
              .part = part, .offset = part * size * numel * 4, .numel = numel};
          window.reduce_scatter(task);
          window.wait_until_taken(part);
          window.offer(part);
          window.all_gather(task);
          const float* const values = floats(window) + part * size * numel;
          for (int64_t i = 0; i < size * numel; ++i) {
            const auto expected =
                static_cast<float>(size * (round + i % 7) + size * (size - 1) / 2);
            ASSERT_EQ(values[i], expected) << "round " << round << ", element " << i;
          }
        }
      }
    });
    for (const std::string& error : errors) {
      EXPECT_EQ(error, "");
    }
  }
}

TEST(HostWindow, ALookDoesNotWait) {
  const auto errors = run_threads({}, [](HostWindow& window, int position) {
    if (position == 0) {
      window.offer(0);
      while (!window.is_offered(0)) {
        std::this_thread::yield();
      }
    } else {
      window.offer(0);
    }
  });
  EXPECT_EQ(errors[0], "");
}

TEST(HostWindow, AMemberThatDoesNotComeIsNamed) {
  const auto errors =
      run_threads({.size = 3, .timeout_s = 0.3}, [](HostWindow& window, int position) {
        if (position != 1) {
          window.offer(1);
          window.reduce_scatter({.part = 1, .numel = 4});
        }
      });
  EXPECT_NE(
      errors[0].find("reduce_scatter of bucket 1 over ranks 10, 11, 12 of this host timed out"),
      std::string::npos)
      << errors[0];
  EXPECT_NE(errors[0].find("rank 11 (position 1"), std::string::npos) << errors[0];
  EXPECT_NE(errors[2].find("did not come"), std::string::npos) << errors[2];
}

TEST(HostWindow, ATaskOutsideIsRefused) {
  const auto errors = run_threads({}, [](HostWindow& window, int) {
    EXPECT_THROW(window.offer(2), std::invalid_argument);
    EXPECT_THROW(window.offer(-1), std::invalid_argument);
    EXPECT_THROW(window.reduce_scatter({.part = 0, .numel = 4096}), std::invalid_argument);
    EXPECT_THROW(window.all_gather({.part = 0, .offset = -4, .numel = 1}), std::invalid_argument);
    EXPECT_THROW(
        window.reduce_scatter(
            {.part = 0, .numel = 1, .dtype = HostDtype::kInt32, .reduction = HostReduction::kAvg}),
        std::invalid_argument);
  });
  EXPECT_EQ(errors[0] + errors[1], "");
}

// Real processes: the windows of a HostComm, then the end of one member.
TEST(HostWindow, ProcessesSeeEachOthersMemoryAndEnd) {
  const int64_t slot_bytes = 1024;
  const int64_t bytes = HostComm::segment_bytes(2, slot_bytes);
  const auto join = [&](HostSegment segment, int position) {
    return std::make_unique<HostComm>(
        std::move(segment),
        HostCommConfig{.position = position, .ranks = {10, 11}, .slot_bytes = slot_bytes});
  };
  auto first = join(HostSegment::create(bytes), 0);
  const pid_t parent = getpid();
  const int file = first->segment().file();
  const pid_t child = fork();
  if (child == 0) {
    auto second = join(HostSegment::open(parent, file, bytes), 1);
    const auto window = second->make_window(64, 1);
    if (window == nullptr) {
      _exit(2);
    }
    for (int i = 0; i < 4; ++i) {
      floats(*window)[i] = 10.0F;
    }
    window->offer(0);
    window->reduce_scatter({.part = 0, .numel = 2});
    _exit(floats(*window)[2] == 12.0F ? 0 : 3);
  }
  const auto window = first->make_window(64, 1);
  ASSERT_NE(window, nullptr);
  first->segment().close_file();
  std::iota(floats(*window), floats(*window) + 4, 0.0F);
  window->offer(0);
  window->reduce_scatter({.part = 0, .numel = 2});
  EXPECT_EQ(floats(*window)[1], 11.0F);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  window->offer(0);
  try {
    window->reduce_scatter({.part = 0, .numel = 2});
    ADD_FAILURE() << "the end of a member went unnoticed";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("lost a peer: the process of rank 11"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace megacore::parallel
