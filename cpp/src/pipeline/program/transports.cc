#include <algorithm>

#include "dependencies.h"
#include "megacore/base/check.h"
#include "program/messages.h"
#include "program/program_errors.h"

namespace megacore::pipeline {
namespace {

using base::concat;

constexpr size_t kMaxTransportReasons = 16;
constexpr int32_t kNoTransfer = -1;

// One send or receive in its queue.
struct QueuedTransfer {
  int32_t rank;
  int32_t position;               // in the steps of its rank
  int32_t partner = kNoTransfer;  // the other end
  int32_t queue = kNoTransfer;
  int32_t next = kNoTransfer;  // behind it in its queue
  bool is_posted = false;
  bool is_at_head = false;
  bool is_done = false;
};

struct Queue {
  int32_t head = kNoTransfer;        // the first transfer that is not done
  int32_t window_end = kNoTransfer;  // the first one that is not at the head
  int32_t num_waiting = 0;           // at the head and not done
};

// Runs the programs of all ranks over the queues of a transport.
class TransportRun {
 public:
  TransportRun(Programs programs, Transport transport)
      : programs_(programs),
        placement_(programs.front().placement),
        transport_(transport),
        position_(programs.size(), 0),
        waits_for_(programs.size(), kNoTransfer),
        batch_left_(programs.size()),
        num_posted_(programs.size(), 0) {
    find_transfers();
    connect();
  }

  // An empty text when all ranks reach their end and all queues are empty.
  std::string run() {
    for (size_t queue = 0; queue < queues_.size(); ++queue) open_window(queue);
    for (size_t rank = programs_.size(); rank-- > 0;) ready_.push_back(static_cast<int32_t>(rank));
    while (!ready_.empty()) {
      const int32_t rank = ready_.back();
      ready_.pop_back();
      advance(static_cast<size_t>(rank));
    }
    return num_done_ == transfers_.size() ? std::string() : report();
  }

 private:
  const ProgramStep& step_of(const QueuedTransfer& transfer) const {
    return programs_[static_cast<size_t>(transfer.rank)]
        .steps[static_cast<size_t>(transfer.position)];
  }

  // The queue, among those of a rank, that a transfer is posted into.
  size_t queue_of(const ProgramStep& step) const {
    const ActionKind kind = step.action.kind;
    switch (transport_) {
      case Transport::kPerChannel:
        return 2 * static_cast<size_t>(step.peer) + (is_send(kind) ? 0U : 1U);
      case Transport::kPerPair:
        return static_cast<size_t>(step.peer);
      case Transport::kPerDirection:
        return kind == ActionKind::kSendForward || kind == ActionKind::kRecvForward ? 0 : 1;
      case Transport::kPerRank:
        return 0;
    }
    return 0;
  }

  size_t queues_per_rank() const {
    return transport_ == Transport::kPerChannel ? 2 * programs_.size()
           : transport_ == Transport::kPerPair  ? programs_.size()
                                                : 2;
  }

  void find_transfers() {
    first_transfer_.push_back(0);
    queues_.resize(programs_.size() * queues_per_rank());
    std::vector<int32_t> last(queues_.size(), kNoTransfer);
    for (size_t rank = 0; rank < programs_.size(); ++rank) {
      const auto& steps = programs_[rank].steps;
      for (size_t position = 0; position < steps.size(); ++position) {
        const ProgramStep& step = steps[position];
        if (!is_transfer(step.action.kind)) continue;
        const size_t queue = rank * queues_per_rank() + queue_of(step);
        const auto id = static_cast<int32_t>(transfers_.size());
        transfers_.push_back({.rank = static_cast<int32_t>(rank),
                              .position = static_cast<int32_t>(position),
                              .queue = static_cast<int32_t>(queue)});
        if (last[queue] == kNoTransfer) {
          queues_[queue].head = queues_[queue].window_end = id;
        } else {
          transfers_[static_cast<size_t>(last[queue])].next = id;
        }
        last[queue] = id;
        if (step.batch >= 0) count_batch(rank, step.batch);
      }
      first_transfer_.push_back(static_cast<int32_t>(transfers_.size()));
    }
  }

  void count_batch(size_t rank, int32_t batch) {
    auto& left = batch_left_[rank];
    if (left.size() <= static_cast<size_t>(batch)) left.resize(static_cast<size_t>(batch) + 1, 0);
    ++left[static_cast<size_t>(batch)];
  }

  // Finds the other end of every transfer, and the receive that every compute action reads.
  void connect() {
    const ValueIndex index(placement_.num_stages(), programs_.front().num_microbatches);
    std::vector<int32_t> sends(index.size(), kNoTransfer);
    receive_of_reader_.assign(index.size(), kNoTransfer);
    const auto reader = [&](const Action& receive) { return index.of(reader_of(receive)); };
    for (size_t id = 0; id < transfers_.size(); ++id) {
      const Action& action = step_of(transfers_[id]).action;
      const bool sends_it = is_send(action.kind);
      const size_t value = reader(sends_it ? receive_for(action, placement_) : action);
      (sends_it ? sends : receive_of_reader_)[value] = static_cast<int32_t>(id);
    }
    for (size_t value = 0; value < sends.size(); ++value) {
      const int32_t send = sends[value];
      const int32_t receive = receive_of_reader_[value];
      if (send == kNoTransfer) continue;
      transfers_[static_cast<size_t>(send)].partner = receive;
      transfers_[static_cast<size_t>(receive)].partner = send;
    }
  }

  // Moves the next transfer of a queue to its head; of a batch, all that are in this queue.
  void open_window(size_t queue_id) {
    Queue& queue = queues_[queue_id];
    if (queue.window_end == kNoTransfer) return;
    const int32_t batch = step_of(transfers_[static_cast<size_t>(queue.window_end)]).batch;
    queue.head = queue.window_end;
    while (queue.window_end != kNoTransfer) {
      QueuedTransfer& transfer = transfers_[static_cast<size_t>(queue.window_end)];
      if (queue.num_waiting > 0 && (batch < 0 || step_of(transfer).batch != batch)) break;
      transfer.is_at_head = true;
      ++queue.num_waiting;
      queue.window_end = transfer.next;
    }
    for (int32_t id = queue.head; id != queue.window_end;) {
      meetings_.push_back(id);
      id = transfers_[static_cast<size_t>(id)].next;
    }
    meet();
  }

  // Lets the transfers in meetings_ happen whose both ends are posted and at the head.
  void meet() {
    if (is_meeting_) return;
    is_meeting_ = true;
    while (!meetings_.empty()) {
      const int32_t id = meetings_.back();
      meetings_.pop_back();
      const int32_t other = transfers_[static_cast<size_t>(id)].partner;
      if (can_happen(id) && can_happen(other)) {
        finish(id);
        finish(other);
      }
    }
    is_meeting_ = false;
  }

  bool can_happen(int32_t id) const {
    const QueuedTransfer& transfer = transfers_[static_cast<size_t>(id)];
    return transfer.is_posted && transfer.is_at_head && !transfer.is_done;
  }

  void finish(int32_t id) {
    QueuedTransfer& transfer = transfers_[static_cast<size_t>(id)];
    transfer.is_done = true;
    ++num_done_;
    const auto rank = static_cast<size_t>(transfer.rank);
    const int32_t batch = step_of(transfer).batch;
    if (batch >= 0) --batch_left_[rank][static_cast<size_t>(batch)];
    if (waits_for_[rank] != kNoTransfer && has_arrived(waits_for_[rank])) {
      waits_for_[rank] = kNoTransfer;
      ready_.push_back(transfer.rank);
    }
    Queue& queue = queues_[static_cast<size_t>(transfer.queue)];
    if (--queue.num_waiting == 0) open_window(static_cast<size_t>(transfer.queue));
  }

  bool has_arrived(int32_t id) const {
    const QueuedTransfer& transfer = transfers_[static_cast<size_t>(id)];
    const int32_t batch = step_of(transfer).batch;
    return transfer.is_done &&
           (batch < 0 ||
            batch_left_[static_cast<size_t>(transfer.rank)][static_cast<size_t>(batch)] == 0);
  }

  void advance(size_t rank) {
    const ValueIndex index(placement_.num_stages(), programs_.front().num_microbatches);
    const auto& steps = programs_[rank].steps;
    size_t& here = position_[rank];
    for (; here < steps.size(); ++here) {
      const Action& action = steps[here].action;
      if (is_transfer(action.kind)) {
        const int32_t id = next_transfer(rank);
        transfers_[static_cast<size_t>(id)].is_posted = true;
        meetings_.push_back(id);
        meet();
      } else if (is_compute(action.kind) && action.kind != ActionKind::kBackwardWeight) {
        const int32_t receive = receive_of_reader_[index.of(action)];
        if (receive == kNoTransfer || has_arrived(receive)) continue;
        waits_for_[rank] = receive;
        return;
      }
    }
  }

  // Transfers are posted in the order of the program.
  int32_t next_transfer(size_t rank) { return first_transfer_[rank] + num_posted_[rank]++; }

  // ---- the report
  // --------------------------------------------------------------------------------

  std::string report() const {
    std::vector<Mark> marks;
    std::string reasons;
    size_t num_stuck = 0;
    for (size_t rank = 0; rank < programs_.size(); ++rank) {
      const std::string reason = reason_of(rank, marks);
      if (!reason.empty() && num_stuck++ < kMaxTransportReasons) reasons += reason;
    }
    return program_report(programs_,
                          marks,
                          concat("they deadlock, ",
                                 num_stuck,
                                 " of ",
                                 programs_.size(),
                                 " ranks, with ",
                                 words(),
                                 reasons));
  }

  std::string_view words() const {
    switch (transport_) {
      case Transport::kPerChannel:
        return "one queue per ordered pair of ranks (per_channel)";
      case Transport::kPerPair:
        return "one queue per pair of ranks (per_pair)";
      case Transport::kPerDirection:
        return "one queue for activations and one for gradients (per_direction)";
      case Transport::kPerRank:
        return "one queue per rank (per_rank): their sends and receives do not follow one order";
    }
    return {};
  }

  // Where a rank stands and what the queue that it needs waits for; marks both places.
  std::string reason_of(size_t rank, std::vector<Mark>& marks) const {
    const auto mark = [&](int64_t position) {
      marks.push_back({static_cast<int>(rank), position});
    };
    const auto here = static_cast<int64_t>(position_[rank]);
    std::string text;
    int32_t wanted = waits_for_[rank];
    if (wanted != kNoTransfer) {
      const ProgramStep& step = step_of(transfers_[static_cast<size_t>(wanted)]);
      mark(here);
      text = concat("\n  rank ",
                    rank,
                    " stops at position ",
                    here,
                    ": ",
                    to_text(programs_[rank].steps[position_[rank]].action),
                    " waits for ",
                    to_text(step.action),
                    " from rank ",
                    step.peer);
    } else {
      wanted = first_undone(rank);
      if (wanted == kNoTransfer) return {};
      text = concat("\n  rank ", rank, " is at its end, but not its transfers");
    }
    const int32_t blocked = blocked_before(wanted);
    if (blocked == kNoTransfer) return text;
    mark(transfers_[static_cast<size_t>(blocked)].position);
    return text + concat(";", blocked_text(blocked));
  }

  int32_t first_undone(size_t rank) const {
    for (int32_t id = first_transfer_[rank]; id < first_transfer_[rank + 1]; ++id) {
      if (!transfers_[static_cast<size_t>(id)].is_done) return id;
    }
    return kNoTransfer;
  }

  // The transfer at the head of the queue that `wanted` is in; of a batch that has arrived in part,
  // one that has not.
  int32_t blocked_before(int32_t wanted) const {
    const QueuedTransfer& transfer = transfers_[static_cast<size_t>(wanted)];
    if (!transfer.is_done) {
      int32_t id = queues_[static_cast<size_t>(transfer.queue)].head;
      while (id != kNoTransfer && transfers_[static_cast<size_t>(id)].is_done) {
        id = transfers_[static_cast<size_t>(id)].next;
      }
      return id;
    }
    const auto rank = static_cast<size_t>(transfer.rank);
    for (int32_t id = first_transfer_[rank]; id < first_transfer_[rank + 1]; ++id) {
      const QueuedTransfer& other = transfers_[static_cast<size_t>(id)];
      if (!other.is_done && step_of(other).batch == step_of(transfer).batch) return id;
    }
    return kNoTransfer;
  }

  std::string blocked_text(int32_t id) const {
    const QueuedTransfer& transfer = transfers_[static_cast<size_t>(id)];
    const QueuedTransfer& partner = transfers_[static_cast<size_t>(transfer.partner)];
    const auto name = [&](const QueuedTransfer& end) {
      return concat(
          to_text(step_of(end).action), " (rank ", end.rank, ", position ", end.position, ")");
    };
    const std::string text =
        concat(" its queue stands at ", name(transfer), ", which needs ", name(partner));
    if (!partner.is_posted) return text + ", not posted yet";
    const int32_t before = blocked_before(transfer.partner);
    if (before == kNoTransfer || before == transfer.partner) return text;
    return text + concat(", behind ", name(transfers_[static_cast<size_t>(before)]));
  }

  Programs programs_;
  const Placement& placement_;
  Transport transport_;
  std::vector<QueuedTransfer> transfers_;   // rank after rank, in program order
  std::vector<int32_t> first_transfer_;     // [num_ranks + 1]
  std::vector<Queue> queues_;               // [num_ranks * queues_per_rank()]
  std::vector<int32_t> receive_of_reader_;  // by value of the reader
  std::vector<size_t> position_;            // by rank
  std::vector<int32_t> waits_for_;          // by rank: the receive that its compute action reads
  std::vector<std::vector<int32_t>> batch_left_;  // by rank and batch: transfers not done
  std::vector<int32_t> num_posted_;               // by rank
  std::vector<int32_t> meetings_;                 // transfers that may happen now
  std::vector<int32_t> ready_;                    // ranks that may go on
  bool is_meeting_ = false;
  size_t num_done_ = 0;
};

}  // namespace

std::string stop_with_transport(Programs programs, Transport transport) {
  return TransportRun(programs, transport).run();
}

}  // namespace megacore::pipeline
