#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "dependencies.h"
#include "megacore/base/check.h"
#include "program/messages.h"
#include "program/program_errors.h"

namespace megacore::pipeline {
namespace {

using base::format_text;

constexpr size_t kMaxStuckRanks = 16;
constexpr int32_t kNoTransfer = -1;

// One send or receive in its queue.
struct QueuedTransfer {
  int32_t rank;
  int32_t position;               // in the steps of its rank
  int32_t partner = kNoTransfer;  // the other end
  int32_t queue = kNoTransfer;
  int32_t next = kNoTransfer;  // behind it in its queue
  bool is_posted = false;
  bool is_done = false;
};

// Runs the programs of all ranks over their queues.
class QueueRun {
 public:
  explicit QueueRun(Programs programs)
      : programs_(programs),
        placement_(programs.front().placement),
        index_(placement_.num_stages(), programs.front().num_microbatches),
        one_queue_(programs.front().receives == Receives::kInOrder),
        position_(programs.size(), 0),
        waits_for_(programs.size(), kNoTransfer),
        num_posted_(programs.size(), 0) {
    find_transfers();
    connect();
  }

  // An empty text when all ranks reach their end and all queues are empty.
  std::string run() {
    for (size_t rank = programs_.size(); rank-- > 0;) ready_.push_back(static_cast<int32_t>(rank));
    while (!ready_.empty()) {
      const int32_t rank = ready_.back();
      ready_.pop_back();
      advance(static_cast<size_t>(rank));
    }
    return num_done_ == transfers_.size() ? std::string() : report();
  }

 private:
  QueuedTransfer& at(int32_t id) { return transfers_[static_cast<size_t>(id)]; }
  const QueuedTransfer& at(int32_t id) const { return transfers_[static_cast<size_t>(id)]; }

  const ProgramStep& step_of(const QueuedTransfer& transfer) const {
    return programs_[static_cast<size_t>(transfer.rank)]
        .steps[static_cast<size_t>(transfer.position)];
  }

  size_t queues_per_rank() const { return one_queue_ ? 1 : 2 * programs_.size(); }

  // The queue that a rank posts a transfer into.
  size_t queue_of(size_t rank, const ProgramStep& step) const {
    if (one_queue_) return rank;
    const size_t channel = 2 * static_cast<size_t>(step.peer) + (is_send(step.action.kind) ? 0 : 1);
    return rank * queues_per_rank() + channel;
  }

  void find_transfers() {
    first_transfer_.push_back(0);
    heads_.assign(programs_.size() * queues_per_rank(), kNoTransfer);
    std::vector<int32_t> last(heads_.size(), kNoTransfer);
    for (size_t rank = 0; rank < programs_.size(); ++rank) {
      const auto& steps = programs_[rank].steps;
      for (size_t position = 0; position < steps.size(); ++position) {
        if (!is_transfer(steps[position].action.kind)) continue;
        const size_t queue = queue_of(rank, steps[position]);
        const auto id = static_cast<int32_t>(transfers_.size());
        transfers_.push_back({.rank = static_cast<int32_t>(rank),
                              .position = static_cast<int32_t>(position),
                              .queue = static_cast<int32_t>(queue)});
        (last[queue] == kNoTransfer ? heads_[queue] : at(last[queue]).next) = id;
        last[queue] = id;
      }
      first_transfer_.push_back(static_cast<int32_t>(transfers_.size()));
    }
  }

  // Finds the other end of every transfer, and the receive that every compute action reads.
  void connect() {
    std::vector<int32_t> sends(index_.size(), kNoTransfer);
    receive_of_reader_.assign(index_.size(), kNoTransfer);
    const auto reader = [&](const Action& receive) { return index_.of(reader_of(receive)); };
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
      at(send).partner = receive;
      at(receive).partner = send;
    }
  }

  void advance(size_t rank) {
    const auto& steps = programs_[rank].steps;
    size_t& here = position_[rank];
    for (; here < steps.size(); ++here) {
      const Action& action = steps[here].action;
      if (is_transfer(action.kind)) {
        // Transfers are posted in the order of the program.
        const int32_t id = first_transfer_[rank] + num_posted_[rank]++;
        at(id).is_posted = true;
        meet(id);
      } else if (is_compute(action.kind) && action.kind != ActionKind::kBackwardWeight) {
        const int32_t receive = receive_of_reader_[index_.of(action)];
        if (receive == kNoTransfer || at(receive).is_done) continue;
        waits_for_[rank] = receive;
        return;
      }
    }
  }

  // Lets a transfer happen if it can, and then those that it has stood before.
  void meet(int32_t first) {
    candidates_.push_back(first);
    while (!candidates_.empty()) {
      const int32_t id = candidates_.back();
      candidates_.pop_back();
      const int32_t other = at(id).partner;
      if (!can_happen(id) || !can_happen(other)) continue;
      for (const int32_t end : {id, other}) {
        finish(end);
        if (at(end).next != kNoTransfer) candidates_.push_back(at(end).next);
      }
    }
  }

  bool can_happen(int32_t id) const {
    return at(id).is_posted && heads_[static_cast<size_t>(at(id).queue)] == id;
  }

  void finish(int32_t id) {
    QueuedTransfer& transfer = at(id);
    transfer.is_done = true;
    ++num_done_;
    heads_[static_cast<size_t>(transfer.queue)] = transfer.next;
    int32_t& waits_for = waits_for_[static_cast<size_t>(transfer.rank)];
    if (waits_for != id) return;
    waits_for = kNoTransfer;
    ready_.push_back(transfer.rank);
  }

  // ---- the report -------------------------------------------------------------------------------

  std::string report() const {
    std::vector<Mark> marks;
    std::string reasons;
    size_t num_stuck = 0;
    for (size_t rank = 0; rank < programs_.size(); ++rank) {
      const std::string reason = reason_of(rank, marks);
      if (!reason.empty() && num_stuck++ < kMaxStuckRanks) reasons += reason;
    }
    const std::string_view queues =
        one_queue_ ? "one queue per rank: their sends and receives do not follow one order"
                   : "one queue per ordered pair of ranks";
    return program_report(programs_, marks,
                          format_text("they deadlock, {} of {} ranks, with {}{}", num_stuck,
                                      programs_.size(), queues, reasons));
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
      const ProgramStep& step = step_of(at(wanted));
      mark(here);
      text = format_text("\n  rank {} stops at position {}: {} waits for {} from rank {}", rank,
                         here, to_text(programs_[rank].steps[position_[rank]].action),
                         to_text(step.action), step.peer);
    } else {
      wanted = first_undone(rank);
      if (wanted == kNoTransfer) return {};
      text = format_text("\n  rank {} is at its end, but not its transfers", rank);
    }
    const int32_t head = head_before(wanted);
    mark(at(head).position);
    return text + format_text(";{}", head_text(head));
  }

  int32_t first_undone(size_t rank) const {
    for (int32_t id = first_transfer_[rank]; id < first_transfer_[rank + 1]; ++id) {
      if (!at(id).is_done) return id;
    }
    return kNoTransfer;
  }

  // The head of the queue that a transfer which is not done is in.
  int32_t head_before(int32_t id) const { return heads_[static_cast<size_t>(at(id).queue)]; }

  std::string head_text(int32_t id) const {
    const QueuedTransfer& transfer = at(id);
    const QueuedTransfer& partner = at(transfer.partner);
    const auto name = [&](const QueuedTransfer& end) {
      return format_text("{} (rank {}, position {})", to_text(step_of(end).action), end.rank,
                         end.position);
    };
    const std::string text =
        format_text(" its queue stands at {}, which needs {}", name(transfer), name(partner));
    if (!partner.is_posted) return text + ", not posted yet";
    const int32_t before = head_before(transfer.partner);
    if (before == transfer.partner) return text;
    return text + format_text(", behind {}", name(at(before)));
  }

  Programs programs_;
  const Placement& placement_;
  ValueIndex index_;
  bool one_queue_;                          // per rank, else one per channel
  std::vector<QueuedTransfer> transfers_;   // rank after rank, in program order
  std::vector<int32_t> first_transfer_;     // [num_ranks + 1]
  std::vector<int32_t> heads_;              // by queue: the first transfer that is not done
  std::vector<int32_t> receive_of_reader_;  // by value of the reader
  std::vector<size_t> position_;            // by rank
  std::vector<int32_t> waits_for_;          // by rank: the receive that its compute action reads
  std::vector<int32_t> num_posted_;         // by rank
  std::vector<int32_t> candidates_;         // transfers that may happen now
  std::vector<int32_t> ready_;              // ranks that may go on
  size_t num_done_ = 0;
};

}  // namespace

void check_deadlock(Programs programs) {
  const std::string stop = QueueRun(programs).run();
  if (!stop.empty()) throw std::invalid_argument(stop);
}

}  // namespace megacore::pipeline
