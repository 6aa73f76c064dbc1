#include "megacore/parallel/host_process.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <optional>
#include <sstream>
#include <string>

namespace megacore::parallel {
namespace {

struct ProcessState {
  char code;  // R running, S sleeping, ... Z and X dead
  uint64_t start_ticks;
};

// The text of a small file; empty where it cannot be read.
std::string read_file(const char* path) {
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) {
    return "";
  }
  std::array<char, 1024> buffer;
  const ssize_t size = read(file, buffer.data(), buffer.size());
  close(file);
  return size > 0 ? std::string(buffer.data(), static_cast<size_t>(size)) : "";
}

// State and start of a process, from the file of its first thread: emulators of other processors
// give each thread a start of its own in /proc/<pid>/stat. The second field, the program's name in
// parentheses, may itself hold spaces and parentheses; the state is field 3 and the start time
// field 22, see proc(5).
std::optional<ProcessState> state_of(int32_t pid) {
  std::array<char, 48> path;
  std::snprintf(path.data(), path.size(), "/proc/%d/task/%d/stat", pid, pid);
  const std::string text = read_file(path.data());
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) {
    return std::nullopt;
  }
  std::istringstream fields(text.substr(name_end + 1));
  ProcessState state{};
  fields >> state.code;
  std::string skipped;
  for (int field = 4; field < 22; ++field) {
    fields >> skipped;
  }
  fields >> state.start_ticks;
  return fields ? std::optional(state) : std::nullopt;
}

}  // namespace

ProcessIdentity this_process() {
  const int32_t pid = getpid();
  const std::optional<ProcessState> state = state_of(pid);
  return {.pid = pid, .start_ticks = state ? state->start_ticks : 0};
}

bool has_ended(const ProcessIdentity& process) {
  if (kill(process.pid, 0) != 0 && errno == ESRCH) {
    return true;
  }
  const std::optional<ProcessState> state = state_of(process.pid);
  if (!state || process.start_ticks == 0) {
    return false;
  }
  return state->code == 'Z' || state->code == 'X' || state->start_ticks != process.start_ticks;
}

}  // namespace megacore::parallel
