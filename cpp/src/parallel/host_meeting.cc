#include "host_meeting.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string_view>
#include <thread>

#include "host_futex.h"
#include "megacore/base/check.h"
#include "megacore/base/intmath.h"
#include "megacore/base/text.h"

namespace megacore::parallel {
namespace {

using base::format_text;
using Clock = std::chrono::steady_clock;

constexpr uint32_t kNoFailure = 0;
constexpr uint32_t kFailureInWork = 1;
constexpr uint32_t kFailureWritten = 2;

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

std::string_view name_of(HostOp op) {
  constexpr std::array<std::string_view, 5> names = {"barrier", "all_reduce", "reduce_scatter",
                                                     "all_gather", "broadcast"};
  return names[static_cast<size_t>(op)];
}

}  // namespace

std::string to_text(const HostCall& call) {
  const std::string tensor = format_text(" of {} {}", call.numel, name_of(call.dtype));
  switch (call.op) {
    case HostOp::kBarrier:
      return "barrier";
    case HostOp::kAllReduce:
      return format_text("all_reduce ({}){}", name_of(call.reduction), tensor);
    case HostOp::kReduceScatter:
      return format_text("reduce_scatter ({}){} per member", name_of(call.reduction), tensor);
    case HostOp::kAllGather:
      return format_text("all_gather{} per member", tensor);
    case HostOp::kBroadcast:
      return format_text("broadcast{} from position {}", tensor, call.source);
  }
  return "";
}

int64_t HostMeeting::front_bytes(int64_t num_members) {
  const int64_t members = num_members * static_cast<int64_t>(sizeof(HostMember));
  return base::align_up(static_cast<int64_t>(sizeof(HostHeader)) + members, 4096);
}

HostMeeting::HostMeeting(std::byte* front, const HostCommConfig& config)
    : config_(config),
      header_(*reinterpret_cast<HostHeader*>(front)),
      members_(reinterpret_cast<HostMember*>(front + sizeof(HostHeader)), config.ranks.size()) {
  const ProcessIdentity self = this_process();
  me().start_ticks.store(self.start_ticks);
  me().pid.store(self.pid);
}

void HostMeeting::leave() { me().has_left.store(1); }

void HostMeeting::begin(const HostCall& call) {
  call_ = call;
  throw_if_failed();
  const size_t parity = (round_ + 1) % 2;
  me().calls[parity] = call;
  meet();
  compare_calls(parity);
}

void HostMeeting::meet() {
  throw_if_failed();
  const uint32_t round = ++round_;
  me().arrived.store(round, std::memory_order_release);
  const uint32_t num_arrived = header_.num_arrived.fetch_add(1, std::memory_order_acq_rel) + 1;
  if (num_arrived < members_.size()) {
    wait_for(round);
    return;
  }
  header_.num_arrived.store(0, std::memory_order_relaxed);
  header_.round.store(round);
  if (header_.num_sleepers.load() > 0) {
    futex_wake_all(header_.round);
  }
}

bool HostMeeting::is_over(uint32_t round) const {
  return header_.round.load(std::memory_order_acquire) == round;
}

void HostMeeting::sleep_until(uint32_t round, double limit_s) {
  // Announced before the kernel looks at the round: the last to arrive either sees this sleeper or
  // has changed the round before. Both need sequential consistency.
  header_.num_sleepers.fetch_add(1);
  futex_wait(header_.round, round - 1, limit_s);
  header_.num_sleepers.fetch_sub(1);
}

void HostMeeting::wait_for(uint32_t round) {
  if (is_soon([this, round] { return is_over(round); })) {
    return;
  }
  const Clock::time_point start = Clock::now();
  double looked_s = 0.0;
  while (true) {
    const double left_s = config_.timeout_s - seconds_since(start);
    sleep_until(round, std::clamp(left_s, 0.0, kLookEveryS));
    if (is_over(round)) {
      return;
    }
    throw_if_failed();
    if (config_.while_waiting) {
      try {
        config_.while_waiting();
      } catch (...) {
        record_failure(HostFailureKind::kInterrupted, {config_.position});
        throw;
      }
    }
    const double waited_s = seconds_since(start);
    if (waited_s - looked_s >= kLookEveryS) {
      looked_s = waited_s;
      look_for_lost_members(round);
    }
    if (waited_s >= config_.timeout_s && !is_over(round)) {
      record_failure(HostFailureKind::kTimedOut, missing(round));
      throw_failure();
    }
  }
}

std::vector<int> HostMeeting::missing(uint32_t round) const {
  std::vector<int> positions;
  for (size_t i = 0; i < members_.size(); ++i) {
    if (members_[i].arrived.load(std::memory_order_acquire) != round) {
      positions.push_back(static_cast<int>(i));
    }
  }
  return positions;
}

void HostMeeting::look_for_lost_members(uint32_t round) {
  std::vector<int> suspects = missing(round);
  if (suspects.empty()) {  // one of them may have died just before it could end the round
    suspects.resize(members_.size());
    std::iota(suspects.begin(), suspects.end(), 0);
  }
  std::vector<int> ended;
  std::vector<int> left;
  for (const int position : suspects) {
    const HostMember& member = members_[static_cast<size_t>(position)];
    const int32_t pid = member.pid.load();
    if (member.has_left.load() != 0) {
      left.push_back(position);
    } else if (pid != 0 && has_ended({.pid = pid, .start_ticks = member.start_ticks.load()})) {
      ended.push_back(position);
    }
  }
  // A member that ended or left after the round was over is no loss to it.
  if ((ended.empty() && left.empty()) || is_over(round)) {
    return;
  }
  if (ended.empty()) {
    record_failure(HostFailureKind::kLeft, left);
  } else {
    record_failure(HostFailureKind::kEnded, ended);
  }
  throw_failure();
}

void HostMeeting::compare_calls(size_t parity) const {
  const HostCall& first = members_[0].calls[parity];
  for (size_t i = 1; i < members_.size(); ++i) {
    const HostCall& other = members_[i].calls[parity];
    if (other != first) {
      throw std::runtime_error(
          format_text("the ranks of a group are in different calls: {} in {}, {} in {}", who(0),
                      to_text(first), who(static_cast<int>(i)), to_text(other)));
    }
  }
}

void HostMeeting::record_failure(HostFailureKind kind, const std::vector<int>& blamed) {
  uint32_t stage = kNoFailure;
  if (!header_.failure_stage.compare_exchange_strong(stage, kFailureInWork)) {
    return;  // another member was first; all tell its story
  }
  header_.failure = {.kind = kind, .op = call_.op};
  for (const int position : blamed) {
    members_[static_cast<size_t>(position)].is_blamed.store(1);
  }
  header_.failure_stage.store(kFailureWritten);
  futex_wake_all(header_.round);
}

void HostMeeting::throw_if_failed() const {
  if (header_.failure_stage.load() != kNoFailure) {
    throw_failure();
  }
}

void HostMeeting::throw_failure() const {
  // Whoever writes the failure needs microseconds; should it die there, what is written must do.
  for (int i = 0; i < 100 && header_.failure_stage.load() != kFailureWritten; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const auto rank_text = [](int rank) { return std::to_string(rank); };
  const HostFailure failure = header_.failure;
  const std::string in_op =
      failure.op == call_.op ? "" : format_text(" in an earlier {}", name_of(failure.op));
  throw std::runtime_error(format_text("{} over ranks {} of this host {}{}", name_of(call_.op),
                                       base::join(config_.ranks, ", ", rank_text),
                                       reason_text(failure.kind), in_op));
}

std::string HostMeeting::reason_text(HostFailureKind kind) const {
  switch (kind) {
    case HostFailureKind::kTimedOut:
      return format_text("timed out after {} s: {} did not come", config_.timeout_s, blamed_text());
    case HostFailureKind::kEnded:
      return format_text("lost a peer: the process of {} has ended", blamed_text());
    case HostFailureKind::kLeft:
      return format_text("lost a peer: {} has left the group", blamed_text());
    case HostFailureKind::kInterrupted:
      return format_text("was given up by a peer: {} was interrupted", blamed_text());
  }
  return "";
}

std::string HostMeeting::who(int position) const {
  const auto index = static_cast<size_t>(position);
  const int32_t pid = members_[index].pid.load();
  const std::string process =
      pid != 0 ? format_text(", pid {}", pid) : std::string(", not started");
  return format_text("rank {} (position {}{})", config_.ranks[index], position, process);
}

std::string HostMeeting::blamed_text() const {
  std::vector<int> blamed;
  for (size_t i = 0; i < members_.size(); ++i) {
    if (members_[i].is_blamed.load() != 0) {
      blamed.push_back(static_cast<int>(i));
    }
  }
  return base::join(blamed, ", ", [this](int position) { return who(position); });
}

}  // namespace megacore::parallel
