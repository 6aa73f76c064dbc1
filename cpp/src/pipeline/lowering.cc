#include "megacore/pipeline/lowering.h"

#include <algorithm>
#include <limits>
#include <map>

#include "dependencies.h"
#include "megacore/base/check.h"
#include "megacore/pipeline/simulate.h"
#include "messages.h"

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

// One compute action ahead of the reader, and never behind a later message of the same channel.
void place_receives(const Channel& channel, std::vector<PlacedReceive>& placed) {
  const size_t begin = placed.size();
  placed.resize(begin + channel.messages.size());
  int32_t latest = INT32_MAX;
  for (size_t i = channel.messages.size(); i-- > 0;) {
    const Message& message = channel.messages[i];
    latest = std::min(latest, std::max(message.read_at - 1, 0));
    placed[begin + i] = {
        .before = latest,
        .step = {
            .action = message.receive, .peer = channel.from, .acknowledged = message.acknowledged}};
  }
}

// Merges the compute actions of a rank, their sends, and its receives, which are ordered by place
// (stably: the order within a channel stays).
std::vector<ProgramStep> assemble(std::span<const Action> actions,
                                  const Placement& placement,
                                  std::vector<PlacedReceive> receives) {
  std::stable_sort(
      receives.begin(), receives.end(), [](const PlacedReceive& a, const PlacedReceive& b) {
        return a.before < b.before;
      });
  std::vector<ProgramStep> steps;
  steps.reserve(2 * actions.size() + receives.size());
  auto receive = receives.begin();
  for (size_t i = 0; i < actions.size(); ++i) {
    for (; receive != receives.end() && receive->before == static_cast<int32_t>(i); ++receive) {
      steps.push_back(receive->step);
    }
    steps.push_back({.action = actions[i]});
    if (const auto send = send_of(actions[i], placement)) steps.push_back(*send);
  }
  return steps;
}

// Receives of a program by channel, in program order, with the places of their readers in
// `actions`.
std::vector<Channel> channels_of(const Program& program, std::span<const Action> actions) {
  const ValueIndex index(program.placement.num_stages(), program.num_microbatches);
  std::vector<int32_t> indices(index.size(), -1);
  for (size_t i = 0; i < actions.size(); ++i) {
    indices[index.of(actions[i])] = static_cast<int32_t>(i);
  }
  std::vector<Channel> channels;
  for (const ProgramStep& step : program.steps) {
    if (!is_recv(step.action.kind)) continue;
    const int32_t read_at = indices[index.of(reader_of(step.action))];
    MC_REQUIRE(read_at >= 0, "rank ", program.rank, ": ", to_text(step.action), " is never read");
    Channel& channel = find_or_add(channels, step.peer, program.rank);
    channel.messages.push_back({.receive = step.action,
                                .made_at = 0,
                                .read_at = read_at,
                                .acknowledged = step.acknowledged});
  }
  std::sort(channels.begin(), channels.end(), [](const Channel& a, const Channel& b) {
    return a.from < b.from;
  });
  return channels;
}

// counts[peer][n]: how many of the program's first n sends to `peer` are forward ones.
std::map<int32_t, std::vector<int32_t>> forward_send_counts(const Program& program) {
  std::map<int32_t, std::vector<int32_t>> counts;
  for (const ProgramStep& step : program.steps) {
    if (!is_send(step.action.kind)) continue;
    std::vector<int32_t>& of_peer = counts[step.peer];
    if (of_peer.empty()) of_peer.push_back(0);
    of_peer.push_back(of_peer.back() + (step.action.kind == ActionKind::kSendForward ? 1 : 0));
  }
  return counts;
}

// The channels of a schedule, by the rank at which they end, with their acknowledgements.
std::vector<std::vector<Channel>> acknowledged_channels(const Schedule& schedule) {
  std::vector<std::vector<Channel>> incoming = incoming_channels(schedule);
  for (std::vector<Channel>& channels : incoming) {
    for (Channel& channel : channels) {
      acknowledge(
          channel,
          find_or_add(incoming[static_cast<size_t>(channel.from)], channel.to, channel.from));
    }
  }
  return incoming;
}

// Programs without steps.
std::vector<Program> empty_programs(const Schedule& schedule, Receives receives) {
  std::vector<Program> programs;
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    programs.push_back({.rank = rank,
                        .placement = schedule.placement,
                        .num_microbatches = schedule.num_microbatches,
                        .forward_only = schedule.forward_only,
                        .receives = receives,
                        .steps = {}});
  }
  return programs;
}

std::vector<Program> lower_ahead(const Schedule& schedule) {
  const std::vector<std::vector<Channel>> incoming = acknowledged_channels(schedule);
  std::vector<Program> programs = empty_programs(schedule, Receives::kAhead);
  for (Program& program : programs) {
    std::vector<PlacedReceive> receives;
    for (const Channel& channel : incoming[static_cast<size_t>(program.rank)]) {
      place_receives(channel, receives);
    }
    program.steps =
        assemble(schedule.rank_actions(program.rank), schedule.placement, std::move(receives));
  }
  return programs;
}

// Both ends of a message, at the time at which it is made if all costs are 1.
struct Transfer {
  double time;
  ProgramStep send;
  ProgramStep receive;  // its peer is the sender
};

// All messages by time; of those made at one time, by sender. A rank makes one at a time.
std::vector<Transfer> transfers_in_order(const Schedule& schedule, const Timeline& timeline) {
  std::vector<Transfer> transfers;
  for (const std::vector<Channel>& channels : acknowledged_channels(schedule)) {
    for (const Channel& channel : channels) {
      const int64_t begin = schedule.offsets[static_cast<size_t>(channel.from)];
      for (const Message& message : channel.messages) {
        const auto made_at = static_cast<size_t>(begin + message.made_at);
        transfers.push_back({.time = timeline.spans[made_at].end,
                             .send = send_of(schedule.actions[made_at], schedule.placement).value(),
                             .receive = {.action = message.receive,
                                         .peer = channel.from,
                                         .acknowledged = message.acknowledged}});
      }
    }
  }
  std::sort(transfers.begin(), transfers.end(), [](const Transfer& a, const Transfer& b) {
    return a.time != b.time ? a.time < b.time : a.receive.peer < b.receive.peer;
  });
  return transfers;
}

std::vector<Program> lower_in_order(const Schedule& schedule) {
  const Timeline timeline = simulate(schedule, {});
  std::vector<Program> programs = empty_programs(schedule, Receives::kInOrder);
  std::vector<int64_t> next(schedule.offsets.begin(), schedule.offsets.end() - 1);
  // Appends the compute actions of a rank that start before `time`.
  const auto compute_until = [&](int32_t rank, double time) {
    const auto r = static_cast<size_t>(rank);
    for (; next[r] < schedule.offsets[r + 1]; ++next[r]) {
      const auto index = static_cast<size_t>(next[r]);
      if (timeline.spans[index].start >= time) break;
      programs[r].steps.push_back({.action = schedule.actions[index]});
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

bool is_forward(ActionKind kind) {
  return kind == ActionKind::kForward || kind == ActionKind::kSendForward ||
         kind == ActionKind::kRecvForward;
}

}  // namespace

std::vector<Program> lower(const Schedule& schedule, Receives receives) {
  return receives == Receives::kAhead ? lower_ahead(schedule) : lower_in_order(schedule);
}

Program forward_only(const Program& program) {
  Program result = program;
  result.forward_only = true;
  std::erase_if(result.steps,
                [](const ProgramStep& step) { return !is_forward(step.action.kind); });
  const auto counts = forward_send_counts(program);
  for (ProgramStep& step : result.steps) {
    if (step.acknowledged == 0) continue;
    step.acknowledged = counts.at(step.peer).at(static_cast<size_t>(step.acknowledged));
  }
  if (program.receives == Receives::kInOrder) return result;

  // What preceded a reader may be gone: place the receives again.
  std::vector<Action> actions;
  for (const ProgramStep& step : result.steps) {
    if (is_compute(step.action.kind)) actions.push_back(step.action);
  }
  std::vector<PlacedReceive> receives;
  for (const Channel& channel : channels_of(result, actions)) place_receives(channel, receives);
  result.steps = assemble(actions, result.placement, std::move(receives));
  return result;
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
