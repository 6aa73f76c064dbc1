#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "dependencies.h"
#include "megacore/base/check.h"
#include "megacore/pipeline/lowering.h"
#include "megacore/pipeline/validate.h"
#include "messages.h"
#include "schedule_table_text.h"

namespace megacore::pipeline {
namespace {

using base::concat;

using Programs = std::span<const Program>;

// Throws with the programs as a table, the given places marked.
[[noreturn]] void refuse(Programs programs, const std::vector<Mark>& marks, std::string text) {
  std::vector<std::vector<Action>> actions;
  for (const Program& program : programs) {
    auto& row = actions.emplace_back();
    for (const ProgramStep& step : program.steps) row.push_back(step.action);
  }
  const std::vector<std::span<const Action>> rows(actions.begin(), actions.end());
  throw std::invalid_argument(
      concat("the programs are not valid: ", text, "\n", marked_table(rows, marks)));
}

[[noreturn]] void refuse_step(Programs programs, int rank, int64_t position, std::string text) {
  const ProgramStep& step =
      programs[static_cast<size_t>(rank)].steps[static_cast<size_t>(position)];
  refuse(programs,
         {{rank, position}},
         concat("rank ", rank, ", position ", position, ": ", to_text(step.action), " ", text));
}

void check_agreement(Programs programs) {
  MC_REQUIRE(!programs.empty(), "there are no programs; give those of all ranks");
  const Program& model = programs.front();
  MC_REQUIRE(static_cast<int>(programs.size()) == model.placement.num_ranks(),
             "there are ",
             programs.size(),
             " programs for ",
             model.placement.num_ranks(),
             " ranks");
  for (size_t rank = 0; rank < programs.size(); ++rank) {
    const Program& program = programs[rank];
    MC_REQUIRE(program.rank == static_cast<int>(rank),
               "program ",
               rank,
               " is that of rank ",
               program.rank,
               "; programs go in rank order");
    MC_REQUIRE(program.placement == model.placement &&
                   program.num_microbatches == model.num_microbatches &&
                   program.forward_only == model.forward_only && program.receives == model.receives,
               "the programs of rank 0 and rank ",
               rank,
               " differ in placement, number of microbatches, forward_only or receives");
  }
}

Schedule schedule_of(Programs programs) {
  Schedule schedule{.name = "program",
                    .placement = programs.front().placement,
                    .num_microbatches = programs.front().num_microbatches,
                    .forward_only = programs.front().forward_only,
                    .actions = {},
                    .offsets = {0}};
  for (const Program& program : programs) {
    for (const ProgramStep& step : program.steps) {
      if (is_compute(step.action.kind)) schedule.actions.push_back(step.action);
    }
    schedule.offsets.push_back(static_cast<int64_t>(schedule.actions.size()));
  }
  return schedule;
}

// What a channel carries, named by its receives, and where its ends stand in their programs.
struct Ends {
  std::vector<Action> sent;
  std::vector<int64_t> send_positions;
  // By message sent: how many messages of the opposite channel the sender had read, without a gap.
  std::vector<int32_t> acknowledgeable;
  std::vector<Action> received;  // in the order of posting
  std::vector<int64_t> receive_positions;
  std::vector<uint8_t> read;  // by index in `received`, while the receiver is scanned
  size_t num_read = 0;        // how many of the first received are all read

  void mark_read(size_t message) {
    read[message] = 1;
    while (num_read < read.size() && read[num_read] != 0) ++num_read;
  }
};

using Channels = std::map<std::pair<int32_t, int32_t>, Ends>;  // by (from, to)

// Scans the programs step by step: sends follow what makes them, receives precede what reads them.
// REQUIRES: the compute actions are a valid schedule.
class Scan {
 public:
  explicit Scan(Programs programs)
      : programs_(programs),
        placement_(programs.front().placement),
        index_(placement_.num_stages(), programs.front().num_microbatches),
        made_(index_.size(), 0),
        sent_(index_.size(), 0),
        posted_(index_.size(), -1) {}

  Channels run() && {
    for (const Program& program : programs_) {
      for (size_t position = 0; position < program.steps.size(); ++position) {
        const Place at{program, program.steps[position], static_cast<int64_t>(position)};
        if (is_compute(at.step.action.kind)) {
          compute(at);
        } else {
          is_send(at.step.action.kind) ? send(at) : receive(at);
        }
      }
    }
    return std::move(channels_);
  }

 private:
  struct Place {
    const Program& program;
    const ProgramStep& step;
    int64_t position;
  };

  void require(bool holds, const Place& at, std::string_view text) const {
    if (!holds) refuse_step(programs_, at.program.rank, at.position, std::string(text));
  }

  void compute(const Place& at) {
    const Action& action = at.step.action;
    if (const auto needed = receive_of(action, placement_)) {
      const int32_t message = posted_[index_.of(reader_of(needed->action))];
      if (message < 0) {
        require(false,
                at,
                concat("reads a message, but no ", to_text(needed->action), " stands before it"));
      }
      channels_[{needed->peer, at.program.rank}].mark_read(static_cast<size_t>(message));
    }
    made_[index_.of(action)] = 1;
  }

  // A send or receive must be about a stage of its rank, and about a value that crosses ranks.
  void check_ends(const Place& at, const Action& compute_action) const {
    const auto [stage, kind, microbatch] = compute_action;
    require(stage >= 0 && stage < placement_.num_stages() && microbatch >= 0 &&
                microbatch < at.program.num_microbatches &&
                placement_.rank_of(stage) == at.program.rank,
            at,
            "does not belong to this rank");
    const auto expected = is_send(at.step.action.kind) ? send_of(compute_action, placement_)
                                                       : receive_of(compute_action, placement_);
    require(expected.has_value(),
            at,
            "has no other end: the neighbouring stage is not on another rank");
    if (at.step.peer != expected->peer) {
      require(
          false,
          at,
          concat("names rank ", at.step.peer, " as its other end; it is rank ", expected->peer));
    }
  }

  void send(const Place& at) {
    const Action maker = maker_of(at.step.action);
    check_ends(at, maker);
    require(made_[index_.of(maker)] != 0, at, "stands before the action that makes its message");
    uint8_t& sent = sent_[index_.of(maker)];
    require(sent == 0, at, "is repeated");
    sent = 1;
    Ends& channel = channels_[{at.program.rank, at.step.peer}];
    channel.sent.push_back(receive_for(at.step.action, placement_));
    channel.send_positions.push_back(at.position);
    const Ends& opposite = channels_[{at.step.peer, at.program.rank}];
    channel.acknowledgeable.push_back(static_cast<int32_t>(opposite.num_read));
  }

  void receive(const Place& at) {
    const Action reader = reader_of(at.step.action);
    check_ends(at, reader);
    int32_t& posted = posted_[index_.of(reader)];
    require(posted < 0, at, "is repeated");
    Ends& channel = channels_[{at.step.peer, at.program.rank}];
    posted = static_cast<int32_t>(channel.received.size());
    channel.received.push_back(at.step.action);
    channel.receive_positions.push_back(at.position);
    channel.read.push_back(0);
  }

  Programs programs_;
  const Placement& placement_;
  ValueIndex index_;
  std::vector<uint8_t> made_;  // by value: its action has been scanned
  std::vector<uint8_t> sent_;  // by value
  std::vector<int32_t>
      posted_;  // by value of the reader: index of its message in its channel, or -1
  Channels channels_;
};

// Both ends list the same messages in the same order.
void check_order(Programs programs, int32_t from, int32_t to, const Ends& channel) {
  const size_t common = std::min(channel.sent.size(), channel.received.size());
  const auto differ = std::mismatch(channel.sent.begin(),
                                    channel.sent.begin() + static_cast<std::ptrdiff_t>(common),
                                    channel.received.begin());
  const auto i = static_cast<size_t>(differ.first - channel.sent.begin());
  if (i == channel.sent.size() && i == channel.received.size()) return;
  const auto contains = [](const std::vector<Action>& list, const Action& action) {
    return std::find(list.begin(), list.end(), action) != list.end();
  };
  if (i < channel.received.size() && !contains(channel.sent, channel.received[i])) {
    refuse_step(programs,
                to,
                channel.receive_positions[i],
                concat("has no send: rank ", from, " never sends this message"));
  }
  if (i < channel.sent.size() && !contains(channel.received, channel.sent[i])) {
    refuse_step(programs, from, channel.send_positions[i], concat("has no receive on rank ", to));
  }
  refuse(programs,
         {{from, channel.send_positions[i]}, {to, channel.receive_positions[i]}},
         concat("from rank ",
                from,
                " to rank ",
                to,
                ", message ",
                i,
                " is sent as ",
                to_text(programs[static_cast<size_t>(from)]
                            .steps[static_cast<size_t>(channel.send_positions[i])]
                            .action),
                " but received as ",
                to_text(channel.received[i]),
                ": a channel must be received in the order of sending"));
}

void check_acknowledged(Programs programs, int32_t to, const Ends& channel) {
  for (size_t i = 0; i < channel.received.size(); ++i) {
    const auto position = static_cast<size_t>(channel.receive_positions[i]);
    const int32_t claimed = programs[static_cast<size_t>(to)].steps[position].acknowledged;
    if (claimed >= 0 && claimed <= channel.acknowledgeable[i]) continue;
    refuse_step(programs,
                to,
                channel.receive_positions[i],
                concat("acknowledges ",
                       claimed,
                       " sends, but when it is sent only ",
                       channel.acknowledgeable[i],
                       " of them have been read"));
  }
}

// Runs the programs with sends and receives that only start; every rank must reach its end.
class Walk {
 public:
  explicit Walk(Programs programs)
      : programs_(programs),
        placement_(programs.front().placement),
        index_(placement_.num_stages(), programs.front().num_microbatches),
        done_(2 * index_.size(), 0),
        waiters_(2 * index_.size(), placement_.num_ranks()),
        position_(programs.size(), 0) {}

  void run() {
    std::vector<int32_t> ready;
    for (int rank = placement_.num_ranks() - 1; rank >= 0; --rank) ready.push_back(rank);
    while (!ready.empty()) {
      const int32_t rank = ready.back();
      ready.pop_back();
      advance(rank, ready);
    }
    check_end();
  }

 private:
  // The place of a value at its maker, or of its message once that is sent.
  size_t place_of(const Action& maker, bool message) const {
    return index_.of(maker) + (message ? index_.size() : 0);
  }

  void advance(int32_t rank, std::vector<int32_t>& ready) {
    const auto& steps = programs_[static_cast<size_t>(rank)].steps;
    size_t& here = position_[static_cast<size_t>(rank)];
    for (; here < steps.size(); ++here) {
      const Action& action = steps[here].action;
      if (is_recv(action.kind)) continue;
      size_t made = 0;
      if (is_send(action.kind)) {
        made = place_of(maker_of(action), true);
      } else {
        if (waits(rank, action)) return;
        made = place_of(action, false);
      }
      done_[made] = 1;
      waiters_.release(made, ready);
    }
  }

  bool waits(int32_t rank, const Action& action) {
    for (const Action& dependency : dependencies_of(action, placement_)) {
      const size_t place = place_of(dependency, placement_.rank_of(dependency.stage) != rank);
      if (done_[place] != 0) continue;
      waiters_.add(place, rank);
      return true;
    }
    return false;
  }

  void check_end() const {
    std::vector<Mark> marks;
    std::string reasons;
    for (size_t rank = 0; rank < programs_.size(); ++rank) {
      if (position_[rank] == programs_[rank].steps.size()) continue;
      marks.push_back({static_cast<int>(rank), static_cast<int64_t>(position_[rank])});
      const Action& stuck = programs_[rank].steps[position_[rank]].action;
      reasons += concat("\n  rank ",
                        rank,
                        " stops at position ",
                        position_[rank],
                        ": ",
                        to_text(stuck),
                        " waits");
      if (const auto message = receive_of(stuck, placement_)) {
        reasons += concat(" for ", to_text(message->action), " from rank ", message->peer);
      }
    }
    if (!marks.empty()) refuse(programs_, marks, concat("they deadlock", reasons));
  }

  Programs programs_;
  const Placement& placement_;
  ValueIndex index_;
  std::vector<uint8_t> done_;  // by place_of()
  Waiters waiters_;
  std::vector<size_t> position_;  // by rank
};

// Runs programs whose sends and receives block: a transfer happens when both its ends have come to
// it. Compute actions never wait here, as what they read was received before.
void check_in_order(Programs programs) {
  std::vector<size_t> position(programs.size(), 0);
  const auto head = [&](size_t rank) {
    const auto& steps = programs[rank].steps;
    while (position[rank] < steps.size() && is_compute(steps[position[rank]].action.kind)) {
      ++position[rank];
    }
    return position[rank] < steps.size() ? &steps[position[rank]] : nullptr;
  };
  const auto meet = [&](const ProgramStep& one, const ProgramStep& other, const Placement& at) {
    return is_send(one.action.kind) && is_recv(other.action.kind) &&
           receive_for(one.action, at) == other.action;
  };
  std::vector<size_t> ready;
  for (size_t rank = programs.size(); rank-- > 0;) ready.push_back(rank);
  while (!ready.empty()) {
    const size_t rank = ready.back();
    ready.pop_back();
    while (const ProgramStep* mine = head(rank)) {
      const auto peer = static_cast<size_t>(mine->peer);
      const ProgramStep* other = head(peer);
      const Placement& placement = programs[rank].placement;
      if (other == nullptr || !(meet(*mine, *other, placement) || meet(*other, *mine, placement))) {
        break;
      }
      ++position[rank];
      ++position[peer];
      ready.push_back(peer);
    }
  }
  std::vector<Mark> marks;
  for (size_t rank = 0; rank < programs.size(); ++rank) {
    if (head(rank) == nullptr) continue;
    marks.push_back({static_cast<int>(rank), static_cast<int64_t>(position[rank])});
  }
  if (!marks.empty()) {
    refuse(programs, marks, "their sends and receives do not follow one order over all ranks");
  }
}

}  // namespace

void validate_programs(std::span<const Program> programs) {
  check_agreement(programs);
  validate(schedule_of(programs));
  const Channels channels = Scan(programs).run();
  for (const auto& [ends, channel] : channels) {
    check_order(programs, ends.first, ends.second, channel);
  }
  for (const auto& [ends, channel] : channels) check_acknowledged(programs, ends.second, channel);
  Walk(programs).run();
  if (programs.front().receives == Receives::kInOrder) check_in_order(programs);
}

}  // namespace megacore::pipeline
