#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "host_comm_group.h"
#include "megacore/parallel/host_comm.h"

namespace megacore::parallel {
namespace {

// Runs `member` in a forked process for every position but 0, and in this one for position 0.
class Processes {
 public:
  Processes(const GroupShape& shape, const std::function<void(HostComm&)>& member)
      : shape_(shape), memory_(HostComm::segment_bytes(shape.size, shape.slot_bytes)) {
    for (int position = 1; position < shape.size; ++position) {
      const pid_t child = fork();
      if (child == 0) {
        int code = 0;
        try {
          member(*join(memory_, shape_, position));
        } catch (const std::exception&) {
          code = 3;
        }
        _exit(code);
      }
      children_.push_back(child);
    }
  }
  ~Processes() {
    for (const pid_t child : children_) {
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
    }
  }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  std::unique_ptr<HostComm> join_as_first() const { return join(memory_, shape_, 0); }
  pid_t child(int position) const { return children_[static_cast<size_t>(position - 1)]; }

  // The exit code of a member; then it is reaped.
  int exit_code(int position) {
    int status = 0;
    waitpid(child(position), &status, 0);
    std::erase(children_, child(position));
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  GroupShape shape_;
  SharedMemory memory_;
  std::vector<pid_t> children_;
};

void add_up(HostComm& comm) {
  for (int round = 0; round < 100; ++round) {
    std::vector<float> data = values_of(comm.position(), 1500);
    comm.all_reduce(bytes(data), 1500, HostDtype::kFloat32, HostReduction::kSum);
    for (int64_t i = 0; i < 1500; ++i) {
      if (data[static_cast<size_t>(i)] != sum_at(comm.size(), i)) {
        throw std::logic_error("a wrong sum");
      }
    }
  }
}

TEST(HostCommProcesses, ShareTheirSums) {
  Processes others({.size = 4, .slot_bytes = 2048}, add_up);
  add_up(*others.join_as_first());
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(others.exit_code(1), 0);
  }
}

TEST(HostCommProcesses, AKilledMemberIsNamedLongBeforeTheTimeout) {
  const Processes others({.size = 3, .timeout_s = 60.0}, [](HostComm& comm) {
    comm.barrier();
    while (comm.position() == 2) {
      pause();
    }
    comm.barrier();
  });
  const auto comm = others.join_as_first();
  comm->barrier();
  const pid_t victim = others.child(2);
  kill(victim, SIGKILL);
  try {
    comm->barrier();
    FAIL() << "met a dead process";
  } catch (const std::runtime_error& error) {
    const std::string text = error.what();
    const std::string who = "rank 12 (position 2, pid " + std::to_string(victim) + ")";
    EXPECT_NE(text.find("lost a peer: the process of " + who + " has ended"), std::string::npos)
        << text;
  }
}

TEST(HostCommProcesses, AMemberKilledWhileItWaitsIsNamedToo) {
  const Processes others({.size = 3, .timeout_s = 60.0}, [](HostComm& comm) {
    if (comm.position() == 2) {
      std::this_thread::sleep_for(std::chrono::seconds(60));  // never comes
    }
    comm.barrier();
  });
  const auto comm = others.join_as_first();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  kill(others.child(2), SIGKILL);
  kill(others.child(1), SIGKILL);  // has arrived, and died waiting
  EXPECT_THROW(comm->barrier(), std::runtime_error);
}

TEST(HostCommProcesses, AForkedCopyIsRefusedAndDoesNotLeave) {
  const GroupShape shape = {.size = 2};
  const SharedMemory memory = memory_for(shape);
  auto comm = join(memory, shape, 0);
  const auto other = join(memory, shape, 1);
  const pid_t child = fork();
  if (child == 0) {
    int code = 0;
    try {
      comm->barrier();
    } catch (const std::invalid_argument&) {
      code = 7;
    }
    comm.reset();
    _exit(code);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 7);
  std::string error;
  std::thread thread([&other, &error] {
    try {
      other->barrier();
    } catch (const std::exception& caught) {
      error = caught.what();
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the other one looks meanwhile
  comm->barrier();
  thread.join();
  EXPECT_EQ(error, "");
}

}  // namespace
}  // namespace megacore::parallel
