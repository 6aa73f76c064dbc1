#include "megacore/pipeline/program/validate_programs.h"

#include <algorithm>
#include <utility>

#include "dependencies.h"
#include "megacore/base/check.h"
#include "megacore/pipeline/validate.h"
#include "program/deadlock.h"
#include "program/messages.h"
#include "program/program_errors.h"

namespace megacore::pipeline {
namespace {

using base::format_text;

constexpr const char* kPairsWithNothing =
    "is marked to overlap with the step after it, which computes nothing";

using Span = std::span<const Program>;

// The program with the index `rank` is that of this rank, for the same pipeline as `model`.
void check_agreement(const Program& program, int rank, const Program& model) {
  MC_REQUIRE(program.rank == rank, "program {} is that of rank {}; programs go in rank order", rank,
             program.rank);
  MC_REQUIRE(program.placement == model.placement &&
                 program.num_microbatches == model.num_microbatches &&
                 program.forward_only == model.forward_only && program.receives == model.receives,
             "the programs of rank 0 and rank {} differ in placement, number of microbatches, "
             "forward_only or receives",
             rank);
}

void check_agreement(Span programs) {
  MC_REQUIRE(!programs.empty(), "there are no programs; give those of all ranks");
  const Program& model = programs.front();
  MC_REQUIRE(static_cast<int>(programs.size()) == model.placement.num_ranks(),
             "there are {} programs for {} ranks", programs.size(), model.placement.num_ranks());
  for (size_t rank = 0; rank < programs.size(); ++rank) {
    check_agreement(programs[rank], static_cast<int>(rank), model);
  }
}

Programs all_of(Span programs) {
  return {static_cast<int>(programs.size()),
          [programs](int rank) -> const Program& { return programs[static_cast<size_t>(rank)]; }};
}

Schedule schedule_of(Span programs) {
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
          refuse_step(all_of(programs), program.rank, static_cast<int64_t>(i), kPairsWithNothing);
        }
        schedule.overlaps.push_back(static_cast<int64_t>(schedule.actions.size()));
      }
      if (is_compute(steps[i].action.kind)) schedule.actions.push_back(steps[i].action);
    }
    schedule.offsets.push_back(static_cast<int64_t>(schedule.actions.size()));
  }
  return schedule;
}

// Scans the programs step by step, rank after rank: sends follow what makes them, receives precede
// what reads them. A message is its value, that of the action that reads it.
// REQUIRES: the schedule is valid.
class Scan {
 public:
  Scan(const Schedule& schedule, Receives receives, const Programs& programs)
      : schedule_(schedule),
        receives_(receives),
        programs_(programs),
        placement_(schedule.placement),
        index_(schedule.num_stages(), schedule.num_microbatches),
        made_(index_.num_messages(), 0),
        sent_(index_.num_messages(), -1),
        received_(index_.num_messages(), -1),
        acknowledgeable_(index_.num_messages(), 0),
        acknowledged_(index_.num_messages(), 0),
        events_(index_.num_messages()) {
    MC_REQUIRE(index_.num_messages() < Events::kMaxMessages,
               "{} stages and {} microbatches are too many to prove their programs",
               schedule.num_stages(), schedule.num_microbatches);
  }

  void run() {
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) scan(programs_.of(rank), rank);
    check_messages();
    check_deadlock(schedule_, receives_, events_, sent_, programs_);
  }

 private:
  struct Place {
    const Program& program;
    const ProgramStep& step;
    int64_t position;
  };

  // What the rank that is scanned has exchanged with another so far.
  struct Peer {
    int32_t rank;
    int32_t num_sent = 0;
    std::vector<uint8_t> read = {};  // by message received, in the order of posting
    size_t num_read = 0;             // how many of the first received are all read

    void mark_read(size_t message) {
      read[message] = 1;
      while (num_read < read.size() && read[num_read] != 0) ++num_read;
    }
  };

  Peer& peer(int32_t rank) {
    for (Peer& known : peers_) {
      if (known.rank == rank) return known;
    }
    return peers_.emplace_back(Peer{.rank = rank});
  }

  void require(bool holds, const Place& at, std::string_view text) const {
    if (!holds) refuse_step(programs_, at.program.rank, at.position, std::string(text));
  }

  void scan(const Program& program, int rank) {
    check_agreement(program, rank,
                    {.rank = 0,
                     .placement = placement_,
                     .num_microbatches = schedule_.num_microbatches,
                     .forward_only = schedule_.forward_only,
                     .receives = receives_,
                     .steps = {}});
    peers_.clear();
    row_ = schedule_.rank_actions(rank);
    pairs_ = overlap_positions(schedule_, rank);
    next_ = next_pair_ = 0;
    for (size_t i = 0; i < program.steps.size(); ++i) {
      const ProgramStep& step = program.steps[i];
      const Place at{program, step, static_cast<int64_t>(i)};
      if (is_compute(step.action.kind)) {
        if (step.starts_pair) {
          const bool pair =
              i + 1 < program.steps.size() && is_compute(program.steps[i + 1].action.kind);
          require(pair, at, kPairsWithNothing);
        }
        compute(at);
      } else if (is_transfer(step.action.kind)) {
        is_send(step.action.kind) ? send(at) : receive(at);
      }
    }
    MC_REQUIRE(next_ == row_.size(), "the program of rank {} has {} of the {} actions of its row",
               rank, next_, row_.size());
    events_.end_rank();
    check_recompute(programs_, program);
  }

  // The next action of the schedule, paired as there.
  void compute(const Place& at) {
    const Action& action = at.step.action;
    require(next_ < row_.size() && action == row_[next_], at,
            "is not the action of the schedule at this place");
    const bool starts_pair =
        next_pair_ < pairs_.size() && pairs_[next_pair_] == static_cast<int64_t>(next_);
    require(at.step.starts_pair == starts_pair, at, "overlaps with other actions than scheduled");
    ++next_;
    if (starts_pair) ++next_pair_;
    if (action.kind == ActionKind::kBackwardWeight) return;
    const size_t value = index_.of(action);
    if (const auto needed = receive_of(action, placement_)) {
      if (received_[value] < 0) {
        require(
            false, at,
            format_text("reads a message, but no {} stands before it", to_text(needed->action)));
      }
      peer(needed->peer).mark_read(static_cast<size_t>(received_[value]));
      events_.add(Events::Kind::kWait, value);
    }
    made_[value] = 1;
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
    const size_t message = index_.of(reader_of(receive_for(at.step.action, placement_)));
    require(sent_[message] < 0, at, "is repeated");
    Peer& to = peer(at.step.peer);
    sent_[message] = to.num_sent++;
    acknowledgeable_[message] = static_cast<int32_t>(to.num_read);
    events_.add(Events::Kind::kSend, message);
  }

  void receive(const Place& at) {
    const Action reader = reader_of(at.step.action);
    check_ends(at, reader);
    const size_t message = index_.of(reader);
    require(received_[message] < 0, at, "is repeated");
    Peer& from = peer(at.step.peer);
    received_[message] = static_cast<int32_t>(from.read.size());
    acknowledged_[message] = at.step.acknowledged;
    from.read.push_back(0);
    events_.add(Events::Kind::kReceive, message);
  }

  // ---- both ends of every message ---------------------------------------------------------------

  // The receive of a message, and the send that belongs to it.
  struct Ends {
    Action receive;
    Action send;
    int32_t to;
    int32_t from;
  };

  Ends ends_of(size_t message) const {
    const auto m = static_cast<size_t>(schedule_.num_microbatches);
    const size_t row = message / m;
    const auto num_stages = static_cast<size_t>(schedule_.num_stages());
    const bool forward = row < num_stages;
    const Action reader = {static_cast<int32_t>(row % num_stages),
                           forward ? ActionKind::kForward : ActionKind::kBackward,
                           static_cast<int32_t>(message % m)};
    const ProgramStep receive = receive_of(reader, placement_).value();
    const int sender = forward ? placement_.previous(reader.stage) : placement_.next(reader.stage);
    return {.receive = receive.action,
            .send = {sender, forward ? ActionKind::kSendForward : ActionKind::kSendBackward,
                     reader.microbatch},
            .to = placement_.rank_of(reader.stage),
            .from = receive.peer};
  }

  int64_t position_of(const Action& action, int32_t rank) const {
    const auto& steps = programs_.of(rank).steps;
    const auto found = std::find_if(steps.begin(), steps.end(),
                                    [&](const ProgramStep& s) { return s.action == action; });
    return found - steps.begin();
  }

  // Every message has both ends, which list the messages of their channel in the same order.
  void check_messages() const {
    for (size_t message = 0; message < sent_.size(); ++message) {
      if (sent_[message] >= 0 && received_[message] >= 0) continue;
      if (sent_[message] == received_[message]) continue;  // stays on its rank
      refuse_end(ends_of(message), received_[message] < 0);
    }
    for (size_t message = 0; message < sent_.size(); ++message) {
      if (sent_[message] != received_[message]) refuse_order(message);
    }
    for (size_t message = 0; message < sent_.size(); ++message) {
      const int32_t claimed = acknowledged_[message];
      if (claimed >= 0 && claimed <= acknowledgeable_[message]) continue;
      const Ends ends = ends_of(message);
      refuse_step(
          programs_, ends.to, position_of(ends.receive, ends.to),
          format_text("acknowledges {} sends, but when it is sent only {} of them have been read",
                      claimed, acknowledgeable_[message]));
    }
  }

  [[noreturn]] void refuse_end(const Ends& ends, bool is_sent) const {
    if (is_sent) {
      refuse_step(programs_, ends.from, position_of(ends.send, ends.from),
                  format_text("has no receive on rank {}", ends.to));
    }
    refuse_step(programs_, ends.to, position_of(ends.receive, ends.to),
                format_text("has no send: rank {} never sends this message", ends.from));
  }

  // Names the first message that the two ends of the channel list differently.
  [[noreturn]] void refuse_order(size_t message) const {
    const auto [receive, send, to, from] = ends_of(message);
    const auto is_of_channel = [&](const ProgramStep& step, bool sends, int32_t peer) {
      const ActionKind kind = step.action.kind;
      return step.peer == peer && (sends ? is_send(kind) : is_recv(kind));
    };
    const auto list = [&](int32_t rank, bool sends, int32_t peer) {
      std::vector<std::pair<int64_t, Action>> transfers;
      const auto& steps = programs_.of(rank).steps;
      for (size_t i = 0; i < steps.size(); ++i) {
        if (is_of_channel(steps[i], sends, peer)) {
          transfers.emplace_back(static_cast<int64_t>(i), steps[i].action);
        }
      }
      return transfers;
    };
    const auto sent = list(from, true, to);
    const auto received = list(to, false, from);
    size_t i = 0;
    while (receive_for(sent[i].second, placement_) == received[i].second) ++i;
    refuse(programs_, {{from, sent[i].first}, {to, received[i].first}},
           format_text(
               "from rank {} to rank {}, message {} is sent as {} but received as {}: a channel "
               "must be received in the order of sending",
               from, to, i, to_text(sent[i].second), to_text(received[i].second)));
  }

  const Schedule& schedule_;
  Receives receives_;
  const Programs& programs_;
  const Placement& placement_;
  ValueIndex index_;
  std::vector<uint8_t> made_;             // by value: its action has been scanned
  std::vector<int32_t> sent_;             // by message: its index in the order of sending, or -1
  std::vector<int32_t> received_;         // by message: its index in the order of posting, or -1
  std::vector<int32_t> acknowledgeable_;  // by message: the opposite ones that its sender had read
  std::vector<int32_t> acknowledged_;     // by message
  Events events_;
  // Of the rank that is scanned:
  std::vector<Peer> peers_;
  std::span<const Action> row_;
  std::vector<int64_t> pairs_;
  size_t next_ = 0;       // in row_
  size_t next_pair_ = 0;  // in pairs_
};

}  // namespace

void validate_programs(const Schedule& schedule, Receives receives, const ProgramOf& program_of) {
  const Programs programs(schedule.num_ranks(), program_of);
  Scan(schedule, receives, programs).run();
}

void validate_programs(std::span<const Program> programs) {
  check_agreement(programs);
  const Schedule schedule = schedule_of(programs);
  validate(schedule);
  Scan(schedule, programs.front().receives, all_of(programs)).run();
}

}  // namespace megacore::pipeline
