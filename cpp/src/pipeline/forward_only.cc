// Orders of forwards for evaluation.

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "megacore/pipeline/schedule.h"

namespace megacore::pipeline {
namespace {

// Lets every rank, step after step, run what has arrived: of it, groups of microbatches one after
// another, in a group the stages in the order of the model. All forwards take one step.
//
// A group has as many microbatches as there are ranks, the last one also those left over. By the
// time a rank has run one of its stages for a group, the group begins to arrive at the next, in a
// loop and in a V; so no rank waits between its first forward and its last.
class Wavefront {
 public:
  Wavefront(const Placement& placement, int num_microbatches)
      : placement_(placement),
        num_microbatches_(num_microbatches),
        next_(static_cast<size_t>(placement.num_stages())),
        arrived_(next_.size()),
        rows_(static_cast<size_t>(placement.num_ranks())) {
    for (int s = 0; s < placement.num_stages(); ++s) {
      const auto [begin, end] = placement.microbatches_of(s, num_microbatches);
      next_[at(s)] = begin;
      arrived_[at(s)] = placement.previous(s) < 0 ? end : begin;
    }
  }

  std::vector<std::vector<Action>> run() && {
    while (step()) {
    }
    return std::move(rows_);
  }

 private:
  static size_t at(int index) { return static_cast<size_t>(index); }

  // Returns whether anything ran.
  bool step() {
    std::vector<int> ran;
    for (int rank = 0; rank < placement_.num_ranks(); ++rank) {
      const int stage = most_urgent(rank);
      if (stage < 0) continue;
      rows_[at(rank)].push_back({stage, ActionKind::kForward, next_[at(stage)]++});
      ran.push_back(stage);
    }
    for (const int stage : ran) {
      if (placement_.next(stage) >= 0) ++arrived_[at(placement_.next(stage))];
    }
    return !ran.empty();
  }

  // Of what has arrived; -1 if nothing has.
  int most_urgent(int rank) const {
    int best = -1;
    for (const int stage : placement_.stages_of(rank)) {
      if (next_[at(stage)] == arrived_[at(stage)]) continue;
      if (best < 0 || urgency(stage) < urgency(best)) best = stage;
    }
    return best;
  }

  std::tuple<int, int> urgency(int stage) const {
    const auto [begin, end] = placement_.microbatches_of(stage, num_microbatches_);
    const int size = placement_.num_ranks();
    const int last_group = std::max((end - begin) / size, 1) - 1;
    const int length = placement_.num_stages() / placement_.num_chains();
    return {std::min((next_[at(stage)] - begin) / size, last_group), stage % length};
  }

  const Placement& placement_;
  int num_microbatches_;
  std::vector<int> next_;     // [stage] microbatch to run
  std::vector<int> arrived_;  // [stage] end of the microbatches that have arrived
  std::vector<std::vector<Action>> rows_;
};

}  // namespace

Schedule forward_only(const Schedule& schedule) {
  Schedule result{.name = schedule.name,
                  .placement = schedule.placement,
                  .num_microbatches = schedule.num_microbatches,
                  .forward_only = true,
                  .actions = {},
                  .offsets = {0}};
  Wavefront wavefront(result.placement, result.num_microbatches);
  for (const std::vector<Action>& row : std::move(wavefront).run()) {
    result.actions.insert(result.actions.end(), row.begin(), row.end());
    result.offsets.push_back(static_cast<int64_t>(result.actions.size()));
  }
  return result;
}

}  // namespace megacore::pipeline
