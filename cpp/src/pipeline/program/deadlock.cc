#include "program/deadlock.h"

#include <algorithm>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "megacore/base/check.h"
#include "program/messages.h"

namespace megacore::pipeline {
namespace {

using base::format_text;
using Kind = Events::Kind;

constexpr size_t kMaxStuckRanks = 16;
constexpr size_t kNoMessage = SIZE_MAX;

// Ranks and channel of every message; the messages of a stage and direction have the same.
class Routes {
 public:
  struct Route {
    int32_t from = -1;
    int32_t to = -1;
    int32_t channel = -1;
    int32_t sending_stage = -1;
  };

  explicit Routes(const Schedule& schedule)
      : num_stages_(schedule.num_stages()),
        num_microbatches_(static_cast<size_t>(schedule.num_microbatches)) {
    const Placement& placement = schedule.placement;
    std::map<std::pair<int32_t, int32_t>, int32_t> channels;
    for (const bool forward : {true, false}) {
      for (int stage = 0; stage < num_stages_; ++stage) {
        const int sender = forward ? placement.previous(stage) : placement.next(stage);
        Route& route = routes_.emplace_back();
        if (sender < 0) continue;
        const int32_t from = placement.rank_of(sender);
        const int32_t to = placement.rank_of(stage);
        const auto next = static_cast<int32_t>(channels.size());
        route = {from, to, channels.try_emplace({from, to}, next).first->second, sender};
      }
    }
    num_channels_ = channels.size();
  }

  size_t num_channels() const { return num_channels_; }
  const Route& of(size_t message) const { return routes_[message / num_microbatches_]; }

  // The send or receive of a message.
  Action transfer(size_t message, bool send) const {
    const size_t row = message / num_microbatches_;
    const auto microbatch = static_cast<int32_t>(message % num_microbatches_);
    const bool forward = row < static_cast<size_t>(num_stages_);
    const auto stage = static_cast<int32_t>(forward ? row : row - static_cast<size_t>(num_stages_));
    if (send) {
      return {routes_[row].sending_stage,
              forward ? ActionKind::kSendForward : ActionKind::kSendBackward, microbatch};
    }
    return {stage, forward ? ActionKind::kRecvForward : ActionKind::kRecvBackward, microbatch};
  }

 private:
  int num_stages_;
  size_t num_microbatches_;
  std::vector<Route> routes_;  // by direction and reading stage
  size_t num_channels_ = 0;
};

// Runs the events of all ranks over their queues.
class QueueRun {
 public:
  QueueRun(const Schedule& schedule,
           Receives receives,
           const Events& events,
           const std::vector<int32_t>& number,
           const Programs& programs)
      : placement_(schedule.placement),
        events_(events),
        number_(number),
        programs_(programs),
        routes_(schedule),
        one_queue_(receives == Receives::kInOrder),
        waits_for_(static_cast<size_t>(schedule.num_ranks()), kNoMessage) {
    for (int32_t rank = 0; rank < schedule.num_ranks(); ++rank) {
      position_.push_back(events.begin(rank));
    }
    if (one_queue_) {
      heads_ = position_;
      done_.assign(number.size(), 0);
    } else {
      ends_.resize(routes_.num_channels());
    }
  }

  // An empty text when all ranks reach their end and all queues are empty.
  std::string run() {
    for (int32_t rank = num_ranks(); rank-- > 0;) ready_.push_back(rank);
    while (!ready_.empty()) {
      const int32_t rank = ready_.back();
      ready_.pop_back();
      advance(rank);
    }
    for (int32_t rank = 0; rank < num_ranks(); ++rank) {
      const bool at_end = position_of(rank) == events_.end(rank);
      if (!at_end || (one_queue_ && posted_head(rank))) return report();
    }
    return {};
  }

 private:
  // How many messages of a channel have been posted at each end. Both ends list the same messages
  // in the same order, so as many have happened as both ends have posted.
  struct ChannelEnds {
    int32_t sent = 0;
    int32_t received = 0;

    int32_t num_done() const { return std::min(sent, received); }
  };

  int32_t num_ranks() const { return static_cast<int32_t>(waits_for_.size()); }
  size_t& position_of(int32_t rank) { return position_[static_cast<size_t>(rank)]; }
  size_t position_of(int32_t rank) const { return position_[static_cast<size_t>(rank)]; }
  size_t& waits_for(int32_t rank) { return waits_for_[static_cast<size_t>(rank)]; }

  bool is_done(size_t message) const {
    if (one_queue_) return done_[message] != 0;
    return number_[message] < ends_[static_cast<size_t>(routes_.of(message).channel)].num_done();
  }

  void advance(int32_t rank) {
    size_t& here = position_of(rank);
    while (here < events_.end(rank)) {
      const size_t message = events_.message(here);
      const Kind kind = events_.kind(here);
      if (kind == Kind::kWait && !is_done(message)) {
        waits_for(rank) = message;
        return;
      }
      ++here;
      if (kind == Kind::kWait) continue;
      one_queue_ ? meet(rank) : post(message, kind);
    }
  }

  // One queue per channel.
  void post(size_t message, Kind kind) {
    const Routes::Route& route = routes_.of(message);
    ChannelEnds& ends = ends_[static_cast<size_t>(route.channel)];
    ++(kind == Kind::kSend ? ends.sent : ends.received);
    const size_t wanted = waits_for(route.to);
    if (wanted != kNoMessage && is_done(wanted)) release(route.to);
  }

  // One queue per rank: lets the transfer at the head happen if it can, and then those behind it.
  void meet(int32_t first) {
    candidates_.push_back(first);
    while (!candidates_.empty()) {
      const int32_t rank = candidates_.back();
      candidates_.pop_back();
      const auto head = posted_head(rank);
      if (!head) continue;
      const size_t message = events_.message(*head);
      const auto [from, to, channel, stage] = routes_.of(message);
      const int32_t other = rank == from ? to : from;
      const auto partner = posted_head(other);
      if (!partner || events_.message(*partner) != message) continue;
      done_[message] = 1;
      for (const int32_t end : {rank, other}) {
        ++heads_[static_cast<size_t>(end)];
        candidates_.push_back(end);
      }
      if (waits_for(to) == message) release(to);
    }
  }

  // The transfer at the head of a rank's queue, if it is posted.
  std::optional<size_t> posted_head(int32_t rank) {
    size_t& head = heads_[static_cast<size_t>(rank)];
    const size_t posted = position_of(rank);
    while (head < posted && events_.kind(head) == Kind::kWait) ++head;
    return head < posted ? std::optional(head) : std::nullopt;
  }

  void release(int32_t rank) {
    waits_for(rank) = kNoMessage;
    ready_.push_back(rank);
  }

  // ---- the report -------------------------------------------------------------------------------

  std::string report() const {
    std::vector<Mark> marks;
    std::string reasons;
    size_t num_stuck = 0;
    for (int32_t rank = 0; rank < num_ranks(); ++rank) {
      const std::string reason = reason_of(rank, marks);
      if (!reason.empty() && num_stuck++ < kMaxStuckRanks) reasons += reason;
    }
    const std::string_view queues =
        one_queue_ ? "one queue per rank: their sends and receives do not follow one order"
                   : "one queue per ordered pair of ranks";
    return program_report(programs_, marks,
                          format_text("they deadlock, {} of {} ranks, with {}{}", num_stuck,
                                      num_ranks(), queues, reasons));
  }

  // Where a rank stands and what the queue that it needs waits for; marks both places.
  std::string reason_of(int32_t rank, std::vector<Mark>& marks) const {
    std::string text;
    std::optional<size_t> wanted;
    if (const size_t message = waits_for_[static_cast<size_t>(rank)]; message != kNoMessage) {
      const int64_t here = step_of(rank, position_of(rank));
      marks.push_back({rank, here});
      const Action action = programs_.of(rank).steps[static_cast<size_t>(here)].action;
      text = format_text("\n  rank {} stops at position {}: {} waits for {} from rank {}", rank,
                         here, to_text(action), to_text(routes_.transfer(message, false)),
                         routes_.of(message).from);
      wanted = find(rank, message, Kind::kReceive);
    } else {
      wanted = first_undone(rank);
      if (!wanted) return {};
      text = format_text("\n  rank {} is at its end, but not its transfers", rank);
    }
    const size_t head = head_before(rank, *wanted);
    marks.push_back({rank, step_of(rank, head)});
    return text + format_text(";{}", head_text(rank, head));
  }

  std::optional<size_t> first_undone(int32_t rank) const {
    for (size_t event = events_.begin(rank); event < events_.end(rank); ++event) {
      if (events_.kind(event) != Kind::kWait && !is_done(events_.message(event))) return event;
    }
    return std::nullopt;
  }

  size_t find(int32_t rank, size_t message, Kind kind) const {
    size_t event = events_.begin(rank);
    while (events_.message(event) != message || events_.kind(event) != kind) ++event;
    return event;
  }

  // The head of the queue that a transfer which is not done is in.
  size_t head_before(int32_t rank, size_t transfer) const {
    const auto queue = [&](size_t event) {
      return std::pair(routes_.of(events_.message(event)).channel, events_.kind(event));
    };
    size_t event = events_.begin(rank);
    while (events_.kind(event) == Kind::kWait || is_done(events_.message(event)) ||
           (!one_queue_ && queue(event) != queue(transfer))) {
      ++event;
    }
    return event;
  }

  // The position of an event in the program of its rank.
  int64_t step_of(int32_t rank, size_t event) const {
    size_t left = event - events_.begin(rank);
    int64_t position = 0;
    for (const ProgramStep& step : programs_.of(rank).steps) {
      const ActionKind kind = step.action.kind;
      if (is_transfer(kind) || (is_compute(kind) && receive_of(step.action, placement_))) {
        if (left-- == 0) break;
      }
      ++position;
    }
    return position;
  }

  std::string head_text(int32_t rank, size_t head) const {
    const auto name = [&](int32_t at, size_t event) {
      const bool send = events_.kind(event) == Kind::kSend;
      return format_text("{} (rank {}, position {})",
                         to_text(routes_.transfer(events_.message(event), send)), at,
                         step_of(at, event));
    };
    const size_t message = events_.message(head);
    const bool sends = events_.kind(head) == Kind::kSend;
    const int32_t other = sends ? routes_.of(message).to : routes_.of(message).from;
    const size_t partner = find(other, message, sends ? Kind::kReceive : Kind::kSend);
    const std::string text = format_text(" its queue stands at {}, which needs {}",
                                         name(rank, head), name(other, partner));
    if (partner >= position_of(other)) return text + ", not posted yet";
    const size_t before = head_before(other, partner);
    if (before == partner) return text;
    return text + format_text(", behind {}", name(other, before));
  }

  const Placement& placement_;
  const Events& events_;
  const std::vector<int32_t>& number_;
  const Programs& programs_;
  Routes routes_;
  bool one_queue_;                   // per rank, else one per channel
  std::vector<size_t> position_;     // by rank: the event at which it stands
  std::vector<size_t> waits_for_;    // by rank: the message that its compute action reads
  std::vector<int32_t> ready_;       // ranks that may go on
  std::vector<ChannelEnds> ends_;    // by channel, with one queue per channel
  std::vector<size_t> heads_;        // by rank, with one queue per rank: nothing before it is left
  std::vector<uint8_t> done_;        // by message, with one queue per rank
  std::vector<int32_t> candidates_;  // ranks whose head may happen now
};

}  // namespace

void check_deadlock(const Schedule& schedule,
                    Receives receives,
                    const Events& events,
                    const std::vector<int32_t>& number,
                    const Programs& programs) {
  const std::string stop = QueueRun(schedule, receives, events, number, programs).run();
  if (!stop.empty()) throw std::invalid_argument(stop);
}

}  // namespace megacore::pipeline
