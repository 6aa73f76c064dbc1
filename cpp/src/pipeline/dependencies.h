// What each compute action waits for, and the order in which a schedule can run.
//
// Private to cpp/src/pipeline: validation, simulation and generators share it.

#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "megacore/pipeline/schedule.h"

namespace megacore::pipeline {

// Values that actions make: the output of (stage, microbatch), the gradient of its input, and the
// gradients of its weights. B and I make the same value.
class ValueIndex {
 public:
  ValueIndex(int num_stages, int num_microbatches)
      : num_microbatches_(static_cast<size_t>(num_microbatches)),
        plane_(static_cast<size_t>(num_stages) * num_microbatches_) {}

  size_t size() const { return 3 * plane_; }
  // Values that can go from rank to rank, named by the action that reads them; they come first.
  size_t num_messages() const { return 2 * plane_; }

  size_t of(const Action& action) const {
    const size_t plane = action.kind == ActionKind::kForward          ? 0
                         : action.kind == ActionKind::kBackwardWeight ? 2
                                                                      : 1;
    return plane * plane_ + static_cast<size_t>(action.stage) * num_microbatches_ +
           static_cast<size_t>(action.microbatch);
  }

 private:
  size_t num_microbatches_;
  size_t plane_;
};

// The actions whose values one compute action reads, at most two. A backward is named B whether it
// is fused or not.
struct Dependencies {
  std::array<Action, 2> actions;
  int count = 0;

  const Action* begin() const { return actions.data(); }
  const Action* end() const { return actions.data() + count; }
  void add(const Action& action) { actions[static_cast<size_t>(count++)] = action; }
};

inline Dependencies dependencies_of(const Action& action, const Placement& placement) {
  Dependencies result;
  const auto [stage, kind, microbatch] = action;
  if (kind == ActionKind::kForward) {
    const int previous = placement.previous(stage);
    if (previous >= 0) result.add({previous, ActionKind::kForward, microbatch});
  } else if (kind == ActionKind::kBackwardWeight) {
    result.add({stage, ActionKind::kBackward, microbatch});
  } else {
    result.add({stage, ActionKind::kForward, microbatch});
    const int next = placement.next(stage);
    if (next >= 0) result.add({next, ActionKind::kBackward, microbatch});
  }
  return result;
}

// Which ranks wait for which value. A rank waits for one value at a time.
class Waiters {
 public:
  Waiters(size_t num_values, int num_ranks)
      : head_(num_values, -1), next_(static_cast<size_t>(num_ranks), -1) {}

  void add(size_t value, int32_t rank) {
    next_[static_cast<size_t>(rank)] = head_[value];
    head_[value] = rank;
  }
  // Moves the ranks that wait for `value` to the end of `ready`.
  void release(size_t value, std::vector<int32_t>& ready) {
    for (int32_t rank = head_[value]; rank >= 0; rank = next_[static_cast<size_t>(rank)]) {
      ready.push_back(rank);
    }
    head_[value] = -1;
  }

 private:
  std::vector<int32_t> head_;  // [num_values]
  std::vector<int32_t> next_;  // [num_ranks]
};

// Which actions start a pair that runs at the same time; empty when there is none.
inline std::vector<uint8_t> pair_starts(const Schedule& schedule) {
  if (schedule.overlaps.empty()) return {};
  std::vector<uint8_t> starts(schedule.actions.size(), 0);
  for (const int64_t index : schedule.overlaps) starts[static_cast<size_t>(index)] = 1;
  return starts;
}

// Runs every rank's actions in its order, each as soon as its dependencies have run, and calls
// on_run(index into schedule.actions, action, dependencies) for each. A pair that overlaps starts
// when the dependencies of both have run. Returns how many actions each rank has run: all of them,
// unless the schedule deadlocks. O(actions).
// REQUIRES: stages and microbatches of all actions are in range; overlaps are pairs of one rank.
template <typename OnRun>
std::vector<int64_t> run_in_order(const Schedule& schedule, OnRun&& on_run) {
  const ValueIndex index(schedule.num_stages(), schedule.num_microbatches);
  std::vector<uint8_t> done(index.size(), 0);
  Waiters waiters(index.size(), schedule.num_ranks());
  const std::vector<uint8_t> starts_pair = pair_starts(schedule);
  std::vector<int64_t> position(schedule.offsets.begin(), schedule.offsets.end() - 1);
  std::vector<int32_t> ready;
  for (int rank = schedule.num_ranks() - 1; rank >= 0; --rank) ready.push_back(rank);

  while (!ready.empty()) {
    const int32_t rank = ready.back();
    ready.pop_back();
    int64_t& here = position[static_cast<size_t>(rank)];
    const auto waits = [&](const Dependencies& dependencies) {
      for (const Action& dependency : dependencies) {
        const size_t value = index.of(dependency);
        if (done[value] != 0) continue;
        waiters.add(value, rank);
        return true;
      }
      return false;
    };
    while (here < schedule.offsets[static_cast<size_t>(rank) + 1]) {
      const auto at = static_cast<size_t>(here);
      const Action& action = schedule.actions[at];
      const Dependencies dependencies = dependencies_of(action, schedule.placement);
      if (waits(dependencies)) break;
      if (!starts_pair.empty() && starts_pair[at] != 0 &&
          waits(dependencies_of(schedule.actions[at + 1], schedule.placement))) {
        break;
      }
      on_run(here, action, dependencies);
      const size_t made = index.of(action);
      done[made] = 1;
      waiters.release(made, ready);
      ++here;
    }
  }
  for (size_t rank = 0; rank < position.size(); ++rank) position[rank] -= schedule.offsets[rank];
  return position;
}

// True when every rank has run all its actions.
bool is_complete(const Schedule& schedule, const std::vector<int64_t>& num_run);

// The error of a schedule that deadlocks: every stuck rank, what it waits for, and the schedule as
// a table with the stuck actions marked.
std::string deadlock_report(const Schedule& schedule, const std::vector<int64_t>& num_run);

}  // namespace megacore::pipeline
