#include "dependencies.h"

#include <algorithm>
#include <optional>

#include "megacore/base/check.h"
#include "schedule_table_text.h"

namespace megacore::pipeline {
namespace {

constexpr size_t kMaxReasons = 16;

// The place of the action that makes the same value as `wanted`: "2B0 (rank 2, position 5)".
std::string place_of(const Schedule& schedule, const Action& wanted) {
  const ValueIndex index(schedule.num_stages(), schedule.num_microbatches);
  const int rank = schedule.placement.rank_of(wanted.stage);
  const auto actions = schedule.rank_actions(rank);
  for (size_t position = 0; position < actions.size(); ++position) {
    if (index.of(actions[position]) == index.of(wanted)) {
      return base::format_text("{} (rank {}, position {})", to_text(actions[position]), rank,
                               position);
    }
  }
  return base::format_text("{} (missing on rank {})", to_text(wanted), rank);
}

}  // namespace

bool is_complete(const Schedule& schedule, const std::vector<int64_t>& num_run) {
  for (size_t rank = 0; rank < num_run.size(); ++rank) {
    if (num_run[rank] != schedule.offsets[rank + 1] - schedule.offsets[rank]) return false;
  }
  return true;
}

std::string deadlock_report(const Schedule& schedule, const std::vector<int64_t>& num_run) {
  const ValueIndex index(schedule.num_stages(), schedule.num_microbatches);
  std::vector<uint8_t> done(index.size(), 0);
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    const auto run = static_cast<size_t>(num_run[static_cast<size_t>(rank)]);
    for (const Action& action : schedule.rank_actions(rank).first(run)) done[index.of(action)] = 1;
  }
  const auto missing = [&](const Action& action) -> std::optional<Action> {
    for (const Action& dependency : dependencies_of(action, schedule.placement)) {
      if (done[index.of(dependency)] == 0) return dependency;
    }
    return std::nullopt;
  };
  std::vector<Mark> marks;
  std::string reasons;
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    const auto actions = schedule.rank_actions(rank);
    const int64_t position = num_run[static_cast<size_t>(rank)];
    if (position == static_cast<int64_t>(actions.size())) continue;
    marks.push_back({rank, position});
    if (marks.size() > kMaxReasons) continue;
    const Action& stuck = actions[static_cast<size_t>(position)];
    const auto wanted = missing(stuck);
    // The second of a pair that overlaps can hold the first one back.
    const Action& waiting = wanted ? stuck : actions[static_cast<size_t>(position) + 1];
    reasons += base::format_text("  rank {} stops at position {}: {} waits for {}\n", rank,
                                 position, to_text(waiting),
                                 place_of(schedule, wanted ? *wanted : *missing(waiting)));
  }
  return base::format_text("the schedule deadlocks: {} of {} ranks wait for each other\n{}{}",
                           marks.size(), schedule.num_ranks(), reasons,
                           marked_table(schedule.rows(), marks));
}

}  // namespace megacore::pipeline
