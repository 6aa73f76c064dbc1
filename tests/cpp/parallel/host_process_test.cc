#include "megacore/parallel/host_process.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

namespace megacore::parallel {
namespace {

TEST(HostProcess, ThisProcessRuns) {
  const ProcessIdentity me = this_process();
  EXPECT_EQ(me.pid, getpid());
  EXPECT_GT(me.start_ticks, 0U);
  EXPECT_EQ(me, this_process());
  EXPECT_FALSE(has_ended(me));
}

TEST(HostProcess, AReusedIdIsAnotherProcess) {
  ProcessIdentity earlier = this_process();
  earlier.start_ticks -= 1;
  EXPECT_TRUE(has_ended(earlier));
  earlier.start_ticks = 0;  // unknown: cannot be told apart
  EXPECT_FALSE(has_ended(earlier));
}

TEST(HostProcess, AKilledProcessHasEndedBeforeAndAfterItIsReaped) {
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    const ProcessIdentity me = this_process();
    const bool written = write(pipe_ends[1], &me, sizeof(me)) == sizeof(me);
    while (written) {
      pause();
    }
    _exit(1);
  }
  ProcessIdentity identity;
  ASSERT_EQ(read(pipe_ends[0], &identity, sizeof(identity)), ssize_t{sizeof(identity)});
  EXPECT_EQ(identity.pid, child);
  EXPECT_FALSE(has_ended(identity));
  kill(child, SIGKILL);
  for (int i = 0; i < 1000 && !has_ended(identity); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_TRUE(has_ended(identity));  // a zombie
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(has_ended(identity));
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

}  // namespace
}  // namespace megacore::parallel
