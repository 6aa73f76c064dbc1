// Random valid schedules, on random placements.

#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "megacore/pipeline/schedule.h"

namespace megacore::pipeline {

// A valid schedule in which every rank takes its actions in random order.
inline Schedule random_schedule(const Placement& placement,
                                int m,
                                bool split,
                                std::mt19937& random) {
  const int num_stages = placement.num_stages();
  std::vector<std::vector<Action>> rows(static_cast<size_t>(placement.num_ranks()));
  std::vector<std::vector<int>> progress(  // 0 nothing, 1 F, 2 B or I, 3 W
      static_cast<size_t>(num_stages), std::vector<int>(static_cast<size_t>(m), 0));
  const auto state = [&](int stage, int mb) -> int& {
    return progress[static_cast<size_t>(stage)][static_cast<size_t>(mb)];
  };
  const bool eager = std::bernoulli_distribution(0.5)(random);
  while (true) {
    std::vector<Action> ready;
    for (int stage = 0; stage < num_stages; ++stage) {
      for (int mb = 0; mb < m; ++mb) {
        const int now = state(stage, mb);
        if (now == 0 && (stage == 0 || state(stage - 1, mb) >= 1)) {
          ready.push_back({stage, ActionKind::kForward, mb});
        }
        if (now == 1 && (stage + 1 == num_stages || state(stage + 1, mb) >= 2)) {
          ready.push_back({stage, split ? ActionKind::kBackwardInput : ActionKind::kBackward, mb});
        }
        if (now == 2 && split) ready.push_back({stage, ActionKind::kBackwardWeight, mb});
      }
    }
    if (ready.empty()) break;
    // Half of the schedules prefer backwards, which keeps memory small.
    std::shuffle(ready.begin(), ready.end(), random);
    const Action action =
        eager ? *std::max_element(ready.begin(), ready.end(),
                                  [](const Action& a, const Action& b) { return a.kind < b.kind; })
              : ready.front();
    rows[static_cast<size_t>(placement.rank_of(action.stage))].push_back(action);
    ++state(action.stage, action.microbatch);
  }
  Schedule schedule{.name = "random",
                    .placement = placement,
                    .num_microbatches = m,
                    .forward_only = false,
                    .actions = {},
                    .offsets = {0}};
  for (const std::vector<Action>& row : rows) {
    schedule.actions.insert(schedule.actions.end(), row.begin(), row.end());
    schedule.offsets.push_back(static_cast<int64_t>(schedule.actions.size()));
  }
  return schedule;
}

// A placement of up to `max_ranks` ranks with one to three stages each on average.
inline Placement random_placement(int max_ranks, std::mt19937& random) {
  const int p = std::uniform_int_distribution<int>(1, max_ranks)(random);
  const int num_stages = std::uniform_int_distribution<int>(p, 3 * p)(random);
  std::vector<int32_t> ranks(static_cast<size_t>(num_stages));
  for (size_t stage = 0; stage < ranks.size(); ++stage) {
    const auto rank = static_cast<int32_t>(stage);
    ranks[stage] = rank < p ? rank : std::uniform_int_distribution<int32_t>(0, p - 1)(random);
  }
  std::shuffle(ranks.begin(), ranks.end(), random);
  return Placement(ranks);
}

}  // namespace megacore::pipeline
