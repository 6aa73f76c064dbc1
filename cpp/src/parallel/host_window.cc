#include "megacore/parallel/host_window.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "host_futex.h"
#include "megacore/base/check.h"
#include "megacore/base/intmath.h"
#include "megacore/base/text.h"
#include "megacore/parallel/epochs.h"
#include "megacore/parallel/host_process.h"

namespace megacore::parallel {

// Written by its owner only, but for num_sleepers.
struct alignas(64) WindowMember {
  std::atomic<int32_t> pid;
  std::atomic<uint64_t> start_ticks;
  std::atomic<uint32_t> has_left;
  std::atomic<uint32_t> num_sleepers;  // members that sleep until this one's flags change
};

namespace {

using base::format_text;
using Clock = std::chrono::steady_clock;

int64_t flags_bytes(int64_t num_parts) {
  return base::align_up(num_parts * static_cast<int64_t>(sizeof(std::atomic<uint32_t>)),
                        int64_t{64});
}

int64_t front_bytes(int64_t num_parts) {
  return base::align_up(static_cast<int64_t>(sizeof(WindowMember)) + 2 * flags_bytes(num_parts),
                        int64_t{4096});
}

void set(std::atomic<uint32_t>& flag, uint32_t round, WindowMember& owner) {
  // Either the sleeper is seen here or it sees the flag: both sequentially consistent.
  flag.store(round);
  if (owner.num_sleepers.load() > 0) {
    futex_wake_all(flag);
  }
}

}  // namespace

int64_t HostWindow::segment_bytes(int64_t bytes, int64_t num_parts) {
  return front_bytes(num_parts) + bytes;
}

HostWindow::HostWindow(std::vector<HostSegment> segments, int64_t num_parts, HostCommConfig config)
    : segments_(std::move(segments)), config_(std::move(config)), owner_pid_(getpid()) {
  MC_REQUIRE(segments_.size() == config_.ranks.size(), "there are {} segments for {} members",
             segments_.size(), config_.ranks.size());
  MC_REQUIRE(num_parts >= 1, "num_parts must be at least 1, got {}", num_parts);
  bytes_ = segments_[0].bytes() - front_bytes(num_parts);
  for (const HostSegment& segment : segments_) {
    MC_REQUIRE(segment.bytes() == segments_[0].bytes() && bytes_ >= 0,
               "the segments of a window must have one size, enough for {} parts", num_parts);
  }
  rounds_.resize(static_cast<size_t>(num_parts));
  const ProcessIdentity self = this_process();
  member(config_.position).start_ticks.store(self.start_ticks);
  member(config_.position).pid.store(self.pid);
}

HostWindow::~HostWindow() {
  if (getpid() == owner_pid_) {
    member(config_.position).has_left.store(1);
  }
}

WindowMember& HostWindow::member(int position) const {
  return *reinterpret_cast<WindowMember*>(segments_[static_cast<size_t>(position)].data());
}

HostWindow::Flags HostWindow::offered(int position) const {
  std::byte* const start = segments_[static_cast<size_t>(position)].data() + sizeof(WindowMember);
  return {reinterpret_cast<std::atomic<uint32_t>*>(start), rounds_.size()};
}

HostWindow::Flags HostWindow::taken(int position) const {
  std::byte* const start = segments_[static_cast<size_t>(position)].data() + sizeof(WindowMember) +
                           flags_bytes(num_parts());
  return {reinterpret_cast<std::atomic<uint32_t>*>(start), rounds_.size()};
}

std::byte* HostWindow::data(int position) const {
  return segments_[static_cast<size_t>(position)].data() + front_bytes(num_parts());
}

void HostWindow::check_task(const Task& task) const {
  MC_REQUIRE(task.part >= 0 && task.part < num_parts(), "part must be in [0, {}), got {}",
             num_parts(), task.part);
  const int64_t end = task.offset + size() * task.numel * bytes_of(task.dtype);
  MC_REQUIRE(task.offset >= 0 && task.numel >= 0 && end <= bytes_,
             "bytes [{}, {}) are not in a window of {}", task.offset, end, bytes_);
  MC_REQUIRE(task.reduction != HostReduction::kAvg || is_floating_point(task.dtype),
             "avg needs a floating point type, not {}", name_of(task.dtype));
  MC_REQUIRE(getpid() == owner_pid_,
             "this window belongs to process {}; it cannot be used after a fork", owner_pid_);
}

void HostWindow::offer(int64_t part) {
  check_task({.part = part});
  const uint32_t round = ++rounds_[static_cast<size_t>(part)];
  set(offered(config_.position)[static_cast<size_t>(part)], round, member(config_.position));
}

bool HostWindow::is_offered(int64_t part) const {
  check_task({.part = part});
  const auto index = static_cast<size_t>(part);
  for (int p = 0; p < size(); ++p) {
    if (!has_reached(offered(p)[index].load(std::memory_order_acquire), rounds_[index])) {
      return false;
    }
  }
  return true;
}

void HostWindow::wait_until_offered(int64_t part) {
  check_task({.part = part});
  wait_for_all(part, &HostWindow::offered, "the start of an exchange of bucket");
}

void HostWindow::take(int64_t part) {
  check_task({.part = part});
  finish(part);
}

void HostWindow::reduce_scatter(const Task& task) {
  check_task(task);
  wait_for_all(task.part, &HostWindow::offered, "reduce_scatter of bucket");
  const int64_t start = task.offset + config_.position * task.numel * bytes_of(task.dtype);
  std::vector<const std::byte*> parts;
  for (int p = 0; p < size(); ++p) {
    parts.push_back(data(p) + start);
  }
  reduce_parts({.parts = parts,
                .numel = task.numel,
                .dtype = task.dtype,
                .reduction = task.reduction,
                .output = data() + start,
                .output_dtype = task.dtype});
  finish(task.part);
}

void HostWindow::all_gather(const Task& task) {
  check_task(task);
  wait_for_all(task.part, &HostWindow::offered, "all_gather of bucket");
  const int64_t slice = task.numel * bytes_of(task.dtype);
  // Each member begins behind itself, so that not all read from one at a time.
  for (int step = 1; step < size(); ++step) {
    const int p = (config_.position + step) % size();
    const int64_t start = task.offset + p * slice;
    if (slice > 0) {
      std::memcpy(data() + start, data(p) + start, static_cast<size_t>(slice));
    }
  }
  finish(task.part);
}

void HostWindow::finish(int64_t part) {
  const auto index = static_cast<size_t>(part);
  set(taken(config_.position)[index], rounds_[index], member(config_.position));
}

void HostWindow::wait_until_taken(int64_t part) {
  check_task({.part = part});
  wait_for_all(part, &HostWindow::taken, "the end of a collective of bucket");
}

bool HostWindow::wait_for_offer_of(int position, int64_t part, uint32_t round, double limit_s) {
  check_message(position, part);
  return wait_for({position, position + 1}, part,
                  {.round = round, .flags = &HostWindow::offered, .what = "a message in slot"},
                  limit_s);
}

void HostWindow::take_from(int position, int64_t part, uint32_t round) {
  check_message(position, part);
  set(taken(config_.position)[static_cast<size_t>(part)], round, member(config_.position));
}

bool HostWindow::wait_for_take_by(int position, int64_t part, double limit_s) {
  check_message(position, part);
  return wait_for({position, position + 1}, part,
                  {.round = rounds_[static_cast<size_t>(part)],
                   .flags = &HostWindow::taken,
                   .what = "the receipt of the message in slot"},
                  limit_s);
}

void HostWindow::check_message(int position, int64_t part) const {
  check_task({.part = part});
  MC_REQUIRE(position >= 0 && position < size(), "position must be in [0, {}), got {}", size(),
             position);
}

void HostWindow::wait_for_all(int64_t part, FlagsOf flags, const char* what) {
  wait_for({0, size()}, part,
           {.round = rounds_[static_cast<size_t>(part)], .flags = flags, .what = what},
           std::numeric_limits<double>::infinity());
}

bool HostWindow::wait_for(Positions positions, int64_t part, const Wait& wait, double limit_s) {
  const auto index = static_cast<size_t>(part);
  const uint32_t round = wait.round;
  const Clock::time_point start = Clock::now();
  const double end_s = std::min(limit_s, config_.timeout_s);
  double looked_s = 0.0;
  for (int p = positions.begin; p < positions.end; ++p) {
    std::atomic<uint32_t>& flag = (this->*wait.flags)(p)[index];
    const auto is_set = [&] { return has_reached(flag.load(std::memory_order_acquire), round); };
    while (limit_s > 0.0 ? !is_soon(is_set) : !is_set()) {
      const double left_s = end_s - seconds_since(start);
      member(p).num_sleepers.fetch_add(1);
      const uint32_t value = flag.load();
      if (!has_reached(value, round)) {
        futex_wait(flag, value, std::clamp(left_s, 0.0, kLookEveryS));
      }
      member(p).num_sleepers.fetch_sub(1);
      if (is_set()) {
        break;
      }
      if (config_.while_waiting) {
        config_.while_waiting();
      }
      const double waited_s = seconds_since(start);
      if (waited_s - looked_s < kLookEveryS && waited_s < end_s) {
        continue;
      }
      looked_s = waited_s;
      const auto is_missing = [&](int other) {
        return !has_reached((this->*wait.flags)(other)[index].load(), round);
      };
      std::vector<int> missing;
      for (int other = p; other < positions.end; ++other) {
        // One that has come and then left is no loss to this exchange: looked at in this order.
        if (is_missing(other) && is_lost(other) && is_missing(other)) {
          throw_lost(other, part, wait.what);
        }
        if (is_missing(other)) {
          missing.push_back(other);
        }
      }
      if (waited_s >= end_s && end_s < config_.timeout_s && !missing.empty()) {
        return false;
      }
      if (waited_s >= config_.timeout_s && !missing.empty()) {
        throw std::runtime_error(format_text("{} timed out after {} s: {} did not come",
                                             about(part, wait.what), config_.timeout_s,
                                             who(missing)));
      }
    }
  }
  return true;
}

bool HostWindow::is_lost(int position) const {
  const WindowMember& other = member(position);
  const int32_t pid = other.pid.load();
  return other.has_left.load() != 0 ||
         (pid != 0 && has_ended({.pid = pid, .start_ticks = other.start_ticks.load()}));
}

void HostWindow::throw_lost(int position, int64_t part, const char* what) const {
  const bool has_left = member(position).has_left.load() != 0;
  throw std::runtime_error(format_text("{} lost a peer: {}{}{}", about(part, what),
                                       has_left ? "" : "the process of ", who({position}),
                                       has_left ? " has left the group" : " has ended"));
}

std::string HostWindow::who(const std::vector<int>& positions) const {
  return base::join(positions, ", ", [this](int position) {
    return format_text("rank {} (position {}, pid {})",
                       config_.ranks[static_cast<size_t>(position)], position,
                       member(position).pid.load());
  });
}

std::string HostWindow::about(int64_t part, const char* what) const {
  const auto rank_text = [](int rank) { return std::to_string(rank); };
  return format_text("{} {} over ranks {} of this host", what, part,
                     base::join(config_.ranks, ", ", rank_text));
}

}  // namespace megacore::parallel
