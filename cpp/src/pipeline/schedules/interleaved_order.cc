#include "schedules/interleaved_order.h"

#include <algorithm>
#include <vector>

#include "dependencies.h"
#include "megacore/pipeline/schedules/schedule_table.h"
#include "schedules/generate.h"

namespace megacore::pipeline {
namespace {

using base::format_text;

// Appends the actions of one rank.
class RankOrder {
 public:
  RankOrder(const InterleavedOrder& order,
            const std::vector<TableEntry>& table,
            int rank,
            std::vector<Action>& actions,
            std::vector<int64_t>& overlaps)
      : order_(order), table_(table), rank_(rank), actions_(actions), overlaps_(overlaps) {}

  void append() {
    const auto warmup = static_cast<size_t>(warmup_of(order_, rank_));
    for (size_t k = 0; k < warmup; ++k) forward(k);
    for (size_t k = warmup; k < table_.size(); ++k) {
      if (order_.pairs) overlaps_.push_back(static_cast<int64_t>(actions_.size()));
      forward(k);
      backward(k - warmup);
    }
    for (size_t k = table_.size() - warmup; k < table_.size(); ++k) backward(k);
    if (order_.backward != BackwardStyle::kLateWeight) return;
    const size_t late = std::min(static_cast<size_t>(rank_), table_.size());
    for (size_t k = table_.size() - late; k < table_.size(); ++k) {
      add_backward(k, ActionKind::kBackwardWeight);
    }
  }

 private:
  void add(int chunk, ActionKind kind, size_t k) {
    actions_.push_back({chunk * order_.num_ranks + rank_, kind, table_[k].microbatch});
  }
  void forward(size_t k) { add(table_[k].chunk, ActionKind::kForward, k); }
  void add_backward(size_t k, ActionKind kind) {
    add(order_.num_chunks - 1 - table_[k].chunk, kind, k);
  }
  void backward(size_t k) {
    if (order_.backward == BackwardStyle::kFused) return add_backward(k, ActionKind::kBackward);
    add_backward(k, ActionKind::kBackwardInput);
    const auto late =
        order_.backward == BackwardStyle::kSplit ? size_t{0} : static_cast<size_t>(rank_);
    if (k >= late) add_backward(k - late, ActionKind::kBackwardWeight);
  }

  const InterleavedOrder& order_;
  const std::vector<TableEntry>& table_;
  int rank_;
  std::vector<Action>& actions_;
  std::vector<int64_t>& overlaps_;
};

// Sizes for which the order is known to run: no group is smaller than p, or there is one group
// only.
bool surely_runs(const InterleavedOrder& order) {
  if (order.num_chunks == 1 || order.group_size >= order.num_microbatches) return true;
  const int last = order.num_microbatches % order.group_size;
  return order.group_size >= order.num_ranks && (last == 0 || last >= order.num_ranks);
}

// The legal values nearest to `value` on either side, within [lowest, limit]: "4 or 6".
// REQUIRES: some value of that range other than `value` is legal.
template <typename RunsWith>
std::string nearest(int value, int lowest, int limit, const RunsWith& runs_with) {
  int below = value - 1;
  while (below >= lowest && !runs_with(below)) --below;
  int above = value + 1;
  while (above <= limit && !runs_with(above)) ++above;
  if (above > limit) return format_text("{}", below);
  return below >= lowest ? format_text("{} or {}", below, above) : format_text("{}", above);
}

[[noreturn]] void refuse(const InterleavedOrder& order) {
  const int p = order.num_ranks;
  const int m = order.num_microbatches;
  const int group = order.group_size;
  InterleavedOrder other = order;
  // One group of all microbatches always runs; so do as many microbatches as one group holds.
  const std::string groups =
      nearest(group, order.smallest_group, std::max(m, group + 1), [&](int candidate) {
        other.group_size = candidate;
        return runs(other);
      });
  other.group_size = group;
  const std::string microbatches = nearest(m, 1, m - m % group + group, [&](int candidate) {
    other.num_microbatches = candidate;
    return runs(other);
  });
  const int last = m % group;
  const std::string reason =
      group < p ? format_text("a group has fewer microbatches than there are ranks")
                : format_text("the last group has {}{}, fewer than there are ranks", last,
                              last == 1 ? " microbatch" : " microbatches");
  throw std::invalid_argument(format_text(
      "{} with num_ranks {}, num_chunks {}, num_microbatches {} and group_size {} deadlocks: {}. "
      "Nearest legal group_size: {}; or, with this group_size, nearest legal num_microbatches: {}",
      order.name, p, order.num_chunks, m, group, reason, groups, microbatches));
}

}  // namespace

int warmup_of(const InterleavedOrder& order, int rank) {
  const int64_t ranks_after = order.num_ranks - rank - 1;
  const int64_t all = static_cast<int64_t>(order.num_chunks) * order.num_microbatches;
  // A value takes a turn of a pair each way between neighbours, so pairs need the second forward of
  // each rank behind; and one more, so that a backward does not wait for its own partner.
  if (order.num_chunks == 1 && !order.pairs) return static_cast<int>(std::min(ranks_after, all));
  const int64_t other_chunks = static_cast<int64_t>(order.num_chunks - 1) * order.group_size;
  const int64_t extra = order.pairs ? 1 : 0;
  return static_cast<int>(
      std::min(order.warmup_multiplier * ranks_after + other_chunks + extra, all));
}

Schedule build(const InterleavedOrder& order) {
  const std::vector<TableEntry> table = schedule_table({.num_microbatches = order.num_microbatches,
                                                        .num_chunks = order.num_chunks,
                                                        .group_size = order.group_size});
  std::vector<int64_t> overlaps;
  Schedule schedule = make_schedule(
      order.name, Placement::loop({.num_ranks = order.num_ranks, .num_chunks = order.num_chunks}),
      order.num_microbatches, actions_per_stage(order.backward),
      [&](int rank, std::vector<Action>& actions) {
        RankOrder(order, table, rank, actions, overlaps).append();
      });
  schedule.overlaps = std::move(overlaps);
  return schedule;
}

bool runs(const InterleavedOrder& order) {
  if (surely_runs(order)) return true;
  const Schedule schedule = build(order);
  return is_complete(schedule,
                     run_in_order(schedule, [](int64_t, const Action&, const Dependencies&) {}));
}

Schedule build_or_refuse(const InterleavedOrder& order) {
  if (!runs(order)) refuse(order);
  return build(order);
}

}  // namespace megacore::pipeline
