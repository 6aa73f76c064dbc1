// Groups of threads or processes that share memory, and values whose sums they can check.

#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "megacore/parallel/host_comm.h"

namespace megacore::parallel {

// Anonymous memory that threads share, and processes forked later.
class SharedMemory {
 public:
  explicit SharedMemory(int64_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  }
  ~SharedMemory() { munmap(data_, static_cast<size_t>(bytes_)); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  HostSegment segment() const { return HostSegment::over(static_cast<std::byte*>(data_), bytes_); }

 private:
  void* data_;
  int64_t bytes_;
};

struct GroupShape {
  int size = 2;
  int64_t slot_bytes = 1024;
  double timeout_s = 20.0;
};

inline std::vector<int> ranks_of(const GroupShape& shape) {
  std::vector<int> ranks;
  for (int position = 0; position < shape.size; ++position) {
    ranks.push_back(10 + position);  // global ranks are not positions
  }
  return ranks;
}

inline std::unique_ptr<HostComm> join(const SharedMemory& memory,
                                      const GroupShape& shape,
                                      int position) {
  return std::make_unique<HostComm>(memory.segment(), HostCommConfig{.position = position,
                                                                     .ranks = ranks_of(shape),
                                                                     .slot_bytes = shape.slot_bytes,
                                                                     .timeout_s = shape.timeout_s});
}

inline SharedMemory memory_for(const GroupShape& shape) {
  return SharedMemory(HostComm::segment_bytes(shape.size, shape.slot_bytes));
}

// Runs `member` in one thread per position; returns what each threw, or "".
inline std::vector<std::string> run_threads(const GroupShape& shape,
                                            const std::function<void(HostComm&)>& member) {
  const SharedMemory memory = memory_for(shape);
  std::vector<std::unique_ptr<HostComm>> comms;
  for (int position = 0; position < shape.size; ++position) {
    comms.push_back(join(memory, shape, position));
  }
  std::vector<std::string> errors(comms.size());
  std::vector<std::thread> threads;
  for (size_t position = 0; position < comms.size(); ++position) {
    threads.emplace_back([&, position] {
      try {
        member(*comms[position]);
      } catch (const std::exception& error) {
        errors[position] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return errors;
}

inline void expect_no_errors(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) {
    EXPECT_EQ(error, "");
  }
}

template <typename T>
std::byte* bytes(std::vector<T>& values) {
  return reinterpret_cast<std::byte*>(values.data());
}

inline float value_of(int position, int64_t index) {
  return static_cast<float>((position + 1) * 1000003 % 977) / 7.0F +
         static_cast<float>(index * 31 % 1009) / 3.0F;
}

inline std::vector<float> values_of(int position, int64_t numel) {
  std::vector<float> values;
  for (int64_t i = 0; i < numel; ++i) {
    values.push_back(value_of(position, i));
  }
  return values;
}

// The sum in the order of positions.
inline float sum_at(int size, int64_t index) {
  float sum = value_of(0, index);
  for (int position = 1; position < size; ++position) {
    sum = sum + value_of(position, index);
  }
  return sum;
}

}  // namespace megacore::parallel
