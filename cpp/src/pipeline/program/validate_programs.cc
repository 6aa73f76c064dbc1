#include "megacore/pipeline/program/validate_programs.h"

#include <algorithm>
#include <map>
#include <utility>

#include "dependencies.h"
#include "megacore/base/check.h"
#include "megacore/pipeline/validate.h"
#include "program/messages.h"
#include "program/program_errors.h"

namespace megacore::pipeline {
namespace {

using base::format_text;

void check_agreement(Programs programs) {
  MC_REQUIRE(!programs.empty(), "there are no programs; give those of all ranks");
  const Program& model = programs.front();
  MC_REQUIRE(static_cast<int>(programs.size()) == model.placement.num_ranks(),
             "there are {} programs for {} ranks", programs.size(), model.placement.num_ranks());
  for (size_t rank = 0; rank < programs.size(); ++rank) {
    const Program& program = programs[rank];
    MC_REQUIRE(program.rank == static_cast<int>(rank),
               "program {} is that of rank {}; programs go in rank order", rank, program.rank);
    MC_REQUIRE(program.placement == model.placement &&
                   program.num_microbatches == model.num_microbatches &&
                   program.forward_only == model.forward_only && program.receives == model.receives,
               "the programs of rank 0 and rank {} differ in placement, number of microbatches, "
               "forward_only or receives",
               rank);
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
    const auto& steps = program.steps;
    for (size_t i = 0; i < steps.size(); ++i) {
      if (steps[i].starts_pair) {
        const bool pair = i + 1 < steps.size() && is_compute(steps[i + 1].action.kind);
        if (!pair) {
          refuse_step(programs, program.rank, static_cast<int64_t>(i),
                      "is marked to overlap with the step after it, which computes nothing");
        }
        schedule.overlaps.push_back(static_cast<int64_t>(schedule.actions.size()));
      }
      if (is_compute(steps[i].action.kind)) schedule.actions.push_back(steps[i].action);
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
        const ActionKind kind = at.step.action.kind;
        if (is_compute(kind)) {
          compute(at);
        } else if (is_transfer(kind)) {
          is_send(kind) ? send(at) : receive(at);
        }
      }
    }
    for (const auto& [ends, channel] : channels_)
      check_ends_exist(ends.first, ends.second, channel);
    return std::move(channels_);
  }

 private:
  void check_ends_exist(int32_t from, int32_t to, const Ends& channel) const {
    for (size_t i = 0; i < channel.received.size(); ++i) {
      if (sent_[index_.of(reader_of(channel.received[i]))] != 0) continue;
      refuse_step(programs_, to, channel.receive_positions[i],
                  format_text("has no send: rank {} never sends this message", from));
    }
    for (size_t i = 0; i < channel.sent.size(); ++i) {
      if (posted_[index_.of(reader_of(channel.sent[i]))] >= 0) continue;
      refuse_step(programs_, from, channel.send_positions[i],
                  format_text("has no receive on rank {}", to));
    }
  }

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
        require(
            false, at,
            format_text("reads a message, but no {} stands before it", to_text(needed->action)));
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
            at, "does not belong to this rank");
    const auto expected = is_send(at.step.action.kind) ? send_of(compute_action, placement_)
                                                       : receive_of(compute_action, placement_);
    require(expected.has_value(), at,
            "has no other end: the neighbouring stage is not on another rank");
    if (at.step.peer != expected->peer) {
      require(false, at,
              format_text("names rank {} as its other end; it is rank {}", at.step.peer,
                          expected->peer));
    }
  }

  void send(const Place& at) {
    const Action maker = maker_of(at.step.action);
    check_ends(at, maker);
    require(made_[index_.of(maker)] != 0, at, "stands before the action that makes its message");
    const Action receive = receive_for(at.step.action, placement_);
    uint8_t& sent = sent_[index_.of(reader_of(receive))];
    require(sent == 0, at, "is repeated");
    sent = 1;
    Ends& channel = channels_[{at.program.rank, at.step.peer}];
    channel.sent.push_back(receive);
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
  std::vector<uint8_t> sent_;  // by value of the reader
  // By value of the reader: index of its message in its channel, or -1.
  std::vector<int32_t> posted_;
  Channels channels_;
};

// The first message that the two ends of a channel list differently, or nothing.
std::optional<size_t> first_difference(const Ends& channel) {
  const auto differ =
      std::mismatch(channel.sent.begin(), channel.sent.end(), channel.received.begin());
  if (differ.first == channel.sent.end()) return std::nullopt;
  return static_cast<size_t>(differ.first - channel.sent.begin());
}

// The ends of every channel list the same messages in the same order.
void check_channel_order(Programs programs, const Channels& channels) {
  for (const auto& [ends, channel] : channels) {
    const auto i = first_difference(channel);
    if (!i) continue;
    const auto [from, to] = ends;
    const int64_t position = channel.send_positions[*i];
    refuse(programs, {{from, position}, {to, channel.receive_positions[*i]}},
           format_text(
               "from rank {} to rank {}, message {} is sent as {} but received as {}: a channel "
               "must be received in the order of sending",
               from, to, *i,
               to_text(
                   programs[static_cast<size_t>(from)].steps[static_cast<size_t>(position)].action),
               to_text(channel.received[*i])));
  }
}

void check_acknowledged(Programs programs, int32_t to, const Ends& channel) {
  for (size_t i = 0; i < channel.received.size(); ++i) {
    const auto position = static_cast<size_t>(channel.receive_positions[i]);
    const int32_t claimed = programs[static_cast<size_t>(to)].steps[position].acknowledged;
    if (claimed >= 0 && claimed <= channel.acknowledgeable[i]) continue;
    refuse_step(
        programs, to, channel.receive_positions[i],
        format_text("acknowledges {} sends, but when it is sent only {} of them have been read",
                    claimed, channel.acknowledgeable[i]));
  }
}

}  // namespace

void validate_programs(std::span<const Program> programs) {
  check_agreement(programs);
  validate(schedule_of(programs));
  const Channels channels = Scan(programs).run();
  check_channel_order(programs, channels);
  for (const auto& [ends, channel] : channels) check_acknowledged(programs, ends.second, channel);
  check_recompute(programs);
  check_deadlock(programs);
}

}  // namespace megacore::pipeline
