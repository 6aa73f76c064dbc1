#include "megacore/pipeline/bounds/critical_path.h"

#include <algorithm>

#include "dependencies.h"
#include "megacore/base/check.h"

namespace megacore::pipeline {
namespace {

// Walks back from the end of a timeline, from each action to one that it had to wait for.
class PathBack {
 public:
  PathBack(const Schedule& schedule, const Timeline& timeline)
      : schedule_(schedule),
        timeline_(timeline),
        starts_pair_(pair_starts(schedule)),
        index_(schedule.num_stages(), schedule.num_microbatches),
        maker_(index_.size(), -1) {
    for (size_t i = 0; i < schedule.actions.size(); ++i) {
      maker_[index_.of(schedule.actions[i])] = static_cast<int64_t>(i);
    }
  }

  std::vector<int64_t> walk() const {
    std::vector<int64_t> path;
    for (int64_t at = last_to_end(); at >= 0; at = before(at)) path.push_back(at);
    std::reverse(path.begin(), path.end());
    return path;
  }

 private:
  const TimedSpan& span(int64_t at) const { return timeline_.spans[static_cast<size_t>(at)]; }
  bool is_pair(int64_t at) const {
    return !starts_pair_.empty() && starts_pair_[static_cast<size_t>(at)] != 0;
  }

  int64_t last_to_end() const {
    const auto last =
        std::max_element(timeline_.spans.begin(), timeline_.spans.end(),
                         [](const TimedSpan& a, const TimedSpan& b) { return a.end < b.end; });
    return last - timeline_.spans.begin();
  }

  // The action that the one at `at` had to wait for, or -1 at the beginning.
  int64_t before(int64_t at) const {
    const double start = span(at).start;
    const Action& action = schedule_.actions[static_cast<size_t>(at)];
    const int rank = schedule_.placement.rank_of(action.stage);
    const bool is_first = at == schedule_.offsets[static_cast<size_t>(rank)];
    if (!is_first && is_pair(at - 1)) return at - 1;
    if (start <= 0.0) return -1;
    if (!is_first && span(at - 1).end == start) return at - 1;
    int64_t found = maker_at(rank, action, start);
    if (found < 0 && is_pair(at)) {
      found = maker_at(rank, schedule_.actions[static_cast<size_t>(at) + 1], start);
    }
    MC_INVARIANT(found >= 0, "{} starts at {} for no reason", to_text(action), start);
    return found;
  }

  // The end of what makes an input that arrives at `start`, or -1. A pair makes its values at its
  // end, so it is entered there.
  int64_t maker_at(int rank, const Action& action, double start) const {
    for (const Action& dependency : dependencies_of(action, schedule_.placement)) {
      const int64_t maker = maker_[index_.of(dependency)];
      const int64_t end = is_pair(maker) ? maker + 1 : maker;
      const bool remote = schedule_.placement.rank_of(dependency.stage) != rank;
      if (span(end).end + (remote ? timeline_.send : 0.0) == start) return end;
    }
    return -1;
  }

  const Schedule& schedule_;
  const Timeline& timeline_;
  std::vector<uint8_t> starts_pair_;
  ValueIndex index_;
  std::vector<int64_t> maker_;  // by value: index of the action that makes it
};

}  // namespace

std::vector<int64_t> critical_path(const Schedule& schedule, const Timeline& timeline) {
  MC_REQUIRE(timeline.spans.size() == schedule.actions.size(),
             "the timeline has {} spans, the schedule {} actions", timeline.spans.size(),
             schedule.actions.size());
  if (schedule.actions.empty()) return {};
  return PathBack(schedule, timeline).walk();
}

}  // namespace megacore::pipeline
