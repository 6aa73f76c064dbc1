#include "megacore/pipeline/program/lowering.h"

#include <algorithm>
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

// The messages from one rank to another, in the order of sending.
using Channel = std::vector<Message>;

// Ranks that hold a stage before or after one of this rank's, ascending.
std::vector<int32_t> peers_of(const Placement& placement, int rank) {
  std::vector<int32_t> peers;
  for (const int32_t stage : placement.stages_of(rank)) {
    for (const int neighbour : {placement.previous(stage), placement.next(stage)}) {
      if (neighbour >= 0 && placement.rank_of(neighbour) != rank) {
        peers.push_back(placement.rank_of(neighbour));
      }
    }
  }
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

// Index of every action that makes a message, or reads one, among the actions of its rank, by the
// value it makes.
std::vector<int32_t> compute_indices(const Schedule& schedule) {
  const ValueIndex index(schedule.num_stages(), schedule.num_microbatches);
  std::vector<int32_t> indices(index.num_messages(), -1);
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    int32_t next = 0;
    for (const Action& action : schedule.rank_actions(rank)) {
      if (action.kind != ActionKind::kBackwardWeight) indices[index.of(action)] = next;
      ++next;
    }
  }
  return indices;
}

Channel channel_between(const Schedule& schedule,
                        const std::vector<int32_t>& indices,
                        int from,
                        int to) {
  const Placement& placement = schedule.placement;
  const ValueIndex index(schedule.num_stages(), schedule.num_microbatches);
  Channel channel;
  int32_t made_at = -1;
  for (const Action& action : schedule.rank_actions(from)) {
    ++made_at;
    const auto send = send_of(action, placement);
    if (!send || send->peer != to) continue;
    const Action receive = receive_for(send->action, placement);
    channel.push_back(
        {.receive = receive, .made_at = made_at, .read_at = indices[index.of(reader_of(receive))]});
  }
  return channel;
}

// A message made at x after its sender had read the first k messages of the opposite channel, in
// order, tells their sender so.
void acknowledge(Channel& channel, const Channel& opposite) {
  size_t num_read = 0;
  for (Message& message : channel) {
    while (num_read < opposite.size() && opposite[num_read].read_at <= message.made_at) {
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
std::vector<PlacedReceive> place_receives(const Channel& channel,
                                          int32_t from,
                                          const ComputeRow& row,
                                          int ahead) {
  std::vector<PlacedReceive> placed(channel.size());
  int32_t latest = INT32_MAX;
  for (size_t i = channel.size(); i-- > 0;) {
    const Message& message = channel[i];
    const int32_t wanted = std::max(row.start_of(message.read_at) - ahead, 0);
    latest = std::min(latest, row.start_of(wanted));
    placed[i] = {
        .before = latest,
        .step = {.action = message.receive, .peer = from, .acknowledged = message.acknowledged}};
  }
  return placed;
}

// Appends a sorted list to a sorted list; of equal ones the first list's stand first.
template <typename Item, typename Less>
void merge_into(std::vector<Item>& items, const std::vector<Item>& more, const Less& less) {
  const auto middle = static_cast<std::ptrdiff_t>(items.size());
  items.insert(items.end(), more.begin(), more.end());
  std::inplace_merge(items.begin(), items.begin() + middle, items.end(), less);
}

// Appends the compute action at `i`, or the pair that begins there. Returns how many those are.
size_t append_compute(const ComputeRow& row, size_t i, std::vector<ProgramStep>& steps) {
  const bool pair = row.is_pair(i);
  steps.push_back({.action = row.actions[i], .starts_pair = pair});
  if (pair) steps.push_back({.action = row.actions[i + 1]});
  return pair ? 2 : 1;
}

// Merges the compute actions of a rank, their sends, and its receives, which are ordered by place.
std::vector<ProgramStep> assemble(const ComputeRow& row,
                                  const Placement& placement,
                                  const std::vector<PlacedReceive>& receives) {
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

// One end of a message, at the time at which it is made if all costs are 1.
struct Transfer {
  double time;
  size_t made_at;  // index into the actions of the schedule: by sender, then in its order
  ProgramStep step;
};

// The order of all transfers of all ranks: by time; of those made at one time, by sender; a pair
// makes two at a time, in order.
bool goes_before(const Transfer& a, const Transfer& b) {
  return a.time != b.time ? a.time < b.time : a.made_at < b.made_at;
}

// The sending or the receiving ends of a channel from a rank, in order.
std::vector<Transfer> transfers_of(const Schedule& schedule,
                                   const Timeline& timeline,
                                   const Channel& channel,
                                   int from,
                                   bool sending) {
  const ComputeRow row = compute_row(schedule, from);
  const auto begin = static_cast<size_t>(schedule.offsets[static_cast<size_t>(from)]);
  std::vector<Transfer> transfers;
  transfers.reserve(channel.size());
  for (const Message& message : channel) {
    const auto at = static_cast<size_t>(message.made_at);
    const ProgramStep step = sending ? send_of(row.actions[at], schedule.placement).value()
                                     : ProgramStep{.action = message.receive,
                                                   .peer = from,
                                                   .acknowledged = message.acknowledged};
    transfers.push_back({.time = timeline.spans[begin + at + (row.is_pair(at) ? 1 : 0)].end,
                         .made_at = begin + at,
                         .step = step});
  }
  return transfers;
}

// Puts every transfer behind the compute actions that start before it.
std::vector<ProgramStep> assemble_in_order(const Schedule& schedule,
                                           const Timeline& timeline,
                                           int rank,
                                           const std::vector<Transfer>& transfers) {
  const ComputeRow row = compute_row(schedule, rank);
  const auto begin = static_cast<size_t>(schedule.offsets[static_cast<size_t>(rank)]);
  std::vector<ProgramStep> steps;
  steps.reserve(row.actions.size() + transfers.size());
  size_t next = 0;
  for (const Transfer& transfer : transfers) {
    while (next < row.actions.size() && timeline.spans[begin + next].start < transfer.time) {
      next += append_compute(row, next, steps);
    }
    steps.push_back(transfer.step);
  }
  while (next < row.actions.size()) next += append_compute(row, next, steps);
  return steps;
}

}  // namespace

Lowering::Lowering(const Schedule& schedule, Receives receives, int ahead)
    : schedule_(&schedule), receives_(receives), ahead_(ahead) {
  MC_REQUIRE(
      ahead >= 0,
      "ahead is {}; it is how many compute actions before its reader a receive stands, 0 at least",
      ahead);
  indices_ = compute_indices(schedule);
  if (receives == Receives::kInOrder) timeline_ = simulate(schedule, {});
}

Program Lowering::program(int rank) const {
  const Schedule& schedule = *schedule_;
  const ComputeRow row = compute_row(schedule, rank);
  std::vector<PlacedReceive> receives;
  std::vector<Transfer> transfers;
  for (const int32_t peer : peers_of(schedule.placement, rank)) {
    Channel incoming = channel_between(schedule, indices_, peer, rank);
    const Channel outgoing = channel_between(schedule, indices_, rank, peer);
    acknowledge(incoming, outgoing);
    if (receives_ == Receives::kAhead) {
      merge_into(receives, place_receives(incoming, peer, row, ahead_),
                 [](const auto& a, const auto& b) { return a.before < b.before; });
    } else {
      merge_into(transfers, transfers_of(schedule, timeline_, incoming, peer, false), goes_before);
      merge_into(transfers, transfers_of(schedule, timeline_, outgoing, rank, true), goes_before);
    }
  }
  return {.rank = rank,
          .placement = schedule.placement,
          .num_microbatches = schedule.num_microbatches,
          .forward_only = schedule.forward_only,
          .receives = receives_,
          .steps = receives_ == Receives::kAhead
                       ? assemble(row, schedule.placement, receives)
                       : assemble_in_order(schedule, timeline_, rank, transfers),
          .ahead = ahead_};
}

std::vector<Program> lower(const Schedule& schedule, Receives receives, int ahead) {
  const Lowering lowering(schedule, receives, ahead);
  std::vector<Program> programs;
  for (int rank = 0; rank < schedule.num_ranks(); ++rank)
    programs.push_back(lowering.program(rank));
  return programs;
}

Program forward_only(const Program& program) {
  const Schedule schedule = forward_only(Schedule{.name = "",
                                                  .placement = program.placement,
                                                  .num_microbatches = program.num_microbatches,
                                                  .actions = {},
                                                  .offsets = {}});
  return Lowering(schedule, program.receives, program.ahead).program(program.rank);
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
