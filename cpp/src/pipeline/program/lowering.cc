#include "megacore/pipeline/program/lowering.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "dependencies.h"
#include "megacore/base/check.h"
#include "megacore/pipeline/simulate.h"
#include "program/messages.h"

namespace megacore::pipeline {
namespace {

// One message, with the places of its ends among the compute actions of their ranks.
struct Message {
  Action receive;
  int32_t made_at;  // by the sender's compute action with this index
  int32_t read_at;  // by the receiver's compute action with this index
  int32_t acknowledged = 0;
};

struct Channel {
  int32_t from;
  int32_t to;
  std::vector<Message> messages;  // in the order of sending
};

// The channels that end, or begin, at one rank: few, as a rank talks to its neighbours only.
Channel& find_or_add(std::vector<Channel>& channels, int32_t from, int32_t to) {
  for (Channel& channel : channels) {
    if (channel.from == from && channel.to == to) return channel;
  }
  return channels.emplace_back(Channel{.from = from, .to = to, .messages = {}});
}

// Index of every compute action among the actions of its rank, by the value it makes.
std::vector<int32_t> compute_indices(const Schedule& schedule, const ValueIndex& index) {
  std::vector<int32_t> indices(index.size(), -1);
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    int32_t next = 0;
    for (const Action& action : schedule.rank_actions(rank)) indices[index.of(action)] = next++;
  }
  return indices;
}

// incoming[r] holds the channels that end at rank r.
std::vector<std::vector<Channel>> incoming_channels(const Schedule& schedule) {
  const Placement& placement = schedule.placement;
  const ValueIndex index(schedule.num_stages(), schedule.num_microbatches);
  const std::vector<int32_t> indices = compute_indices(schedule, index);
  std::vector<std::vector<Channel>> incoming(static_cast<size_t>(schedule.num_ranks()));
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    for (const Action& action : schedule.rank_actions(rank)) {
      const auto send = send_of(action, placement);
      if (!send) continue;
      const Action receive = receive_for(send->action, placement);
      Channel& channel = find_or_add(incoming[static_cast<size_t>(send->peer)], rank, send->peer);
      channel.messages.push_back({.receive = receive,
                                  .made_at = indices[index.of(action)],
                                  .read_at = indices[index.of(reader_of(receive))]});
    }
  }
  return incoming;
}

// A message made at x after its sender had read the first k messages of the opposite channel, in
// order, tells their sender so.
void acknowledge(Channel& channel, const Channel& opposite) {
  size_t num_read = 0;
  for (Message& message : channel.messages) {
    while (num_read < opposite.messages.size() &&
           opposite.messages[num_read].read_at <= message.made_at) {
      ++num_read;
    }
    message.acknowledged = static_cast<int32_t>(num_read);
  }
}

// Receives of one rank, each with the index of the compute action it stands before.
struct PlacedReceive {
  int32_t before;
  ProgramStep step;
};

// The compute actions of one rank.
struct ComputeRow {
  std::span<const Action> actions;
  std::vector<uint8_t> starts_pair;  // by action, or empty if no two overlap

  // The first of the pair that holds an action, or the action itself.
  int32_t start_of(int32_t action) const {
    const bool second =
        !starts_pair.empty() && action > 0 && starts_pair[static_cast<size_t>(action) - 1] != 0;
    return second ? action - 1 : action;
  }
  bool is_pair(size_t action) const { return !starts_pair.empty() && starts_pair[action] != 0; }
};

ComputeRow compute_row(const Schedule& schedule, int rank) {
  ComputeRow row{.actions = schedule.rank_actions(rank), .starts_pair = {}};
  const std::vector<int64_t> pairs = overlap_positions(schedule, rank);
  if (!pairs.empty()) row.starts_pair.assign(row.actions.size(), 0);
  for (const int64_t position : pairs) row.starts_pair[static_cast<size_t>(position)] = 1;
  return row;
}

// `ahead` compute actions before the reader, never between two that overlap, and never behind a
// later message of the same channel.
void place_receives(const Channel& channel,
                    const ComputeRow& row,
                    int ahead,
                    std::vector<PlacedReceive>& placed) {
  const size_t begin = placed.size();
  placed.resize(begin + channel.messages.size());
  int32_t latest = INT32_MAX;
  for (size_t i = channel.messages.size(); i-- > 0;) {
    const Message& message = channel.messages[i];
    const int32_t wanted = std::max(row.start_of(message.read_at) - ahead, 0);
    latest = std::min(latest, row.start_of(wanted));
    placed[begin + i] = {
        .before = latest,
        .step = {
            .action = message.receive, .peer = channel.from, .acknowledged = message.acknowledged}};
  }
}

// Appends the compute action at `i`, or the pair that begins there. Returns how many those are.
size_t append_compute(const ComputeRow& row, size_t i, std::vector<ProgramStep>& steps) {
  const bool pair = row.is_pair(i);
  steps.push_back({.action = row.actions[i], .starts_pair = pair});
  if (pair) steps.push_back({.action = row.actions[i + 1]});
  return pair ? 2 : 1;
}

// Merges the compute actions of a rank, their sends, and its receives, which are ordered by place
// (stably: the order within a channel stays).
std::vector<ProgramStep> assemble(const ComputeRow& row,
                                  const Placement& placement,
                                  std::vector<PlacedReceive> receives) {
  std::stable_sort(
      receives.begin(), receives.end(),
      [](const PlacedReceive& a, const PlacedReceive& b) { return a.before < b.before; });
  std::vector<ProgramStep> steps;
  steps.reserve(2 * row.actions.size() + receives.size());
  auto receive = receives.begin();
  for (size_t i = 0; i < row.actions.size();) {
    for (; receive != receives.end() && receive->before == static_cast<int32_t>(i); ++receive) {
      steps.push_back(receive->step);
    }
    for (const size_t end = i + append_compute(row, i, steps); i < end; ++i) {
      if (const auto send = send_of(row.actions[i], placement)) steps.push_back(*send);
    }
  }
  return steps;
}

// The channels of a schedule, by the rank at which they end, with their acknowledgements.
std::vector<std::vector<Channel>> acknowledged_channels(const Schedule& schedule) {
  std::vector<std::vector<Channel>> incoming = incoming_channels(schedule);
  for (std::vector<Channel>& channels : incoming) {
    for (Channel& channel : channels) {
      acknowledge(channel, find_or_add(incoming[static_cast<size_t>(channel.from)], channel.to,
                                       channel.from));
    }
  }
  return incoming;
}

// Programs without steps.
std::vector<Program> empty_programs(const Schedule& schedule, Receives receives, int ahead) {
  std::vector<Program> programs;
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    programs.push_back({.rank = rank,
                        .placement = schedule.placement,
                        .num_microbatches = schedule.num_microbatches,
                        .forward_only = schedule.forward_only,
                        .receives = receives,
                        .steps = {},
                        .ahead = ahead});
  }
  return programs;
}

std::vector<Program> lower_ahead(const Schedule& schedule, int ahead) {
  const std::vector<std::vector<Channel>> incoming = acknowledged_channels(schedule);
  std::vector<Program> programs = empty_programs(schedule, Receives::kAhead, ahead);
  for (Program& program : programs) {
    const ComputeRow row = compute_row(schedule, program.rank);
    std::vector<PlacedReceive> receives;
    for (const Channel& channel : incoming[static_cast<size_t>(program.rank)]) {
      place_receives(channel, row, ahead, receives);
    }
    program.steps = assemble(row, schedule.placement, std::move(receives));
  }
  return programs;
}

// Both ends of a message, at the time at which it is made if all costs are 1.
struct Transfer {
  double time;
  size_t made_at;  // index into the actions of the schedule: by sender, then in its order
  ProgramStep send;
  ProgramStep receive;  // its peer is the sender
};

// All messages by time; of those made at one time, by sender; a pair makes two at a time, in order.
std::vector<Transfer> transfers_in_order(const Schedule& schedule, const Timeline& timeline) {
  const std::vector<uint8_t> starts_pair = pair_starts(schedule);
  std::vector<Transfer> transfers;
  for (const std::vector<Channel>& channels : acknowledged_channels(schedule)) {
    for (const Channel& channel : channels) {
      const int64_t begin = schedule.offsets[static_cast<size_t>(channel.from)];
      for (const Message& message : channel.messages) {
        const auto made_at = static_cast<size_t>(begin + message.made_at);
        const bool pair = !starts_pair.empty() && starts_pair[made_at] != 0;
        transfers.push_back({.time = timeline.spans[made_at + (pair ? 1 : 0)].end,
                             .made_at = made_at,
                             .send = send_of(schedule.actions[made_at], schedule.placement).value(),
                             .receive = {.action = message.receive,
                                         .peer = channel.from,
                                         .acknowledged = message.acknowledged}});
      }
    }
  }
  std::sort(transfers.begin(), transfers.end(), [](const Transfer& a, const Transfer& b) {
    return a.time != b.time ? a.time < b.time : a.made_at < b.made_at;
  });
  return transfers;
}

std::vector<Program> lower_in_order(const Schedule& schedule, int ahead) {
  const Timeline timeline = simulate(schedule, {});
  std::vector<Program> programs = empty_programs(schedule, Receives::kInOrder, ahead);
  std::vector<ComputeRow> rows;
  for (const Program& program : programs) rows.push_back(compute_row(schedule, program.rank));
  std::vector<size_t> next(rows.size(), 0);
  // Appends the compute actions of a rank that start before `time`.
  const auto compute_until = [&](int32_t rank, double time) {
    const auto r = static_cast<size_t>(rank);
    const auto begin = static_cast<size_t>(schedule.offsets[r]);
    while (next[r] < rows[r].actions.size() && timeline.spans[begin + next[r]].start < time) {
      next[r] += append_compute(rows[r], next[r], programs[r].steps);
    }
  };
  for (const Transfer& transfer : transfers_in_order(schedule, timeline)) {
    const int32_t from = transfer.receive.peer;
    const int32_t to = transfer.send.peer;
    compute_until(from, transfer.time);
    compute_until(to, transfer.time);
    programs[static_cast<size_t>(from)].steps.push_back(transfer.send);
    programs[static_cast<size_t>(to)].steps.push_back(transfer.receive);
  }
  for (const Program& program : programs) {
    compute_until(program.rank, std::numeric_limits<double>::infinity());
  }
  return programs;
}

}  // namespace

std::vector<Program> lower(const Schedule& schedule, Receives receives, int ahead) {
  MC_REQUIRE(
      ahead >= 0,
      "ahead is {}; it is how many compute actions before its reader a receive stands, 0 at least",
      ahead);
  return receives == Receives::kAhead ? lower_ahead(schedule, ahead)
                                      : lower_in_order(schedule, ahead);
}

Program forward_only(const Program& program) {
  const Schedule schedule = {.name = "",
                             .placement = program.placement,
                             .num_microbatches = program.num_microbatches,
                             .actions = {},
                             .offsets = {}};
  std::vector<Program> programs = lower(forward_only(schedule), program.receives, program.ahead);
  return std::move(programs[static_cast<size_t>(program.rank)]);
}

std::string to_text(const Program& program) {
  std::string text;
  for (const ProgramStep& step : program.steps) {
    if (!text.empty()) text += ' ';
    append_text(step.action, text);
  }
  return text;
}

}  // namespace megacore::pipeline
