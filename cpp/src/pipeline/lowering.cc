#include "megacore/pipeline/lowering.h"

#include <algorithm>
#include <map>

#include "dependencies.h"
#include "megacore/base/check.h"
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
    if (read_at < 0) continue;  // its reader is not among the actions
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

}  // namespace

std::vector<Program> lower(const Schedule& schedule) {
  std::vector<std::vector<Channel>> incoming = incoming_channels(schedule);
  for (std::vector<Channel>& channels : incoming) {
    for (Channel& channel : channels) {
      acknowledge(
          channel,
          find_or_add(incoming[static_cast<size_t>(channel.from)], channel.to, channel.from));
    }
  }
  std::vector<Program> programs;
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    std::vector<PlacedReceive> receives;
    for (const Channel& channel : incoming[static_cast<size_t>(rank)]) {
      place_receives(channel, receives);
    }
    programs.push_back(
        {.rank = rank,
         .placement = schedule.placement,
         .num_microbatches = schedule.num_microbatches,
         .forward_only = schedule.forward_only,
         .steps = assemble(schedule.rank_actions(rank), schedule.placement, std::move(receives))});
  }
  return programs;
}

Program forward_only(const Program& program) {
  std::vector<Action> actions;
  for (const ProgramStep& step : program.steps) {
    if (step.action.kind == ActionKind::kForward) actions.push_back(step.action);
  }
  const auto counts = forward_send_counts(program);
  std::vector<PlacedReceive> receives;
  for (Channel& channel : channels_of(program, actions)) {
    for (Message& message : channel.messages) {
      if (message.acknowledged == 0) continue;
      message.acknowledged = counts.at(channel.from).at(static_cast<size_t>(message.acknowledged));
    }
    place_receives(channel, receives);
  }
  return {.rank = program.rank,
          .placement = program.placement,
          .num_microbatches = program.num_microbatches,
          .forward_only = true,
          .steps = assemble(actions, program.placement, std::move(receives))};
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
