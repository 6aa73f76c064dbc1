#include "megacore/pipeline/validate.h"

#include <algorithm>
#include <string>
#include <vector>

#include "dependencies.h"
#include "megacore/base/check.h"
#include "megacore/base/intmath.h"
#include "schedule_table_text.h"

namespace megacore::pipeline {
namespace {

using base::format_text;

constexpr size_t kMaxProblems = 10;

// Problems found so far; the first few are kept, in words and as marks.
class Problems {
 public:
  void add(std::string text) {
    if (count_++ < kMaxProblems) list_ += format_text("  {}\n", text);
  }
  void add_at(int rank, size_t position, std::string text) {
    if (count_ < kMaxProblems) marks_.push_back({rank, static_cast<int64_t>(position)});
    add(format_text("rank {}, position {}: {}", rank, position, text));
  }
  bool empty() const { return count_ == 0; }

  std::string report(const Schedule& schedule) const {
    std::string rest;
    if (count_ > kMaxProblems) rest = format_text("  and {} more\n", count_ - kMaxProblems);
    return format_text("the schedule is not valid: {}{}{}{}{}", count_,
                       count_ == 1 ? " problem\n" : " problems\n", list_, rest,
                       marked_table(schedule.rows(), marks_));
  }

 private:
  size_t count_ = 0;
  std::string list_;
  std::vector<Mark> marks_;
};

void check_shape(const Schedule& schedule) {
  MC_REQUIRE(schedule.num_microbatches >= 1, "num_microbatches must be at least 1, got {}",
             schedule.num_microbatches);
  MC_REQUIRE(schedule.offsets.size() == static_cast<size_t>(schedule.num_ranks()) + 1 &&
                 schedule.offsets.front() == 0 &&
                 schedule.offsets.back() == static_cast<int64_t>(schedule.actions.size()),
             "the offsets of the schedule do not cover its {} actions", schedule.actions.size());
  for (size_t rank = 0; rank + 1 < schedule.offsets.size(); ++rank) {
    MC_REQUIRE(schedule.offsets[rank] <= schedule.offsets[rank + 1],
               "the offsets of rank {} go backwards", rank);
  }
  // Each pair needs a forward, so this many pairs cannot be complete; do not allocate for them.
  const int64_t pairs = base::checked_mul(schedule.num_stages(), schedule.num_microbatches);
  const auto num_actions = static_cast<int64_t>(schedule.actions.size());
  MC_REQUIRE(
      pairs <= 4 * num_actions + 4096,
      "{} stages and {} microbatches need {} forwards at least, but the schedule has {} actions",
      schedule.num_stages(), schedule.num_microbatches, pairs, num_actions);
}

// What is wrong with an action by itself, or an empty text.
std::string misplaced(const Schedule& schedule, int rank, const Action& action) {
  if (!is_compute(action.kind)) {
    return format_text("{} is communication; a schedule holds compute actions only",
                       to_text(action));
  }
  if (action.stage < 0 || action.stage >= schedule.num_stages()) {
    return format_text("{}: stage {} is outside 0..{}", to_text(action), action.stage,
                       schedule.num_stages() - 1);
  }
  if (action.microbatch < 0 || action.microbatch >= schedule.num_microbatches) {
    return format_text("{}: microbatch {} is outside 0..{}", to_text(action), action.microbatch,
                       schedule.num_microbatches - 1);
  }
  const MicrobatchRange range =
      schedule.placement.microbatches_of(action.stage, schedule.num_microbatches);
  if (action.microbatch < range.begin || action.microbatch >= range.end) {
    return format_text("{}: chain {} runs microbatches {}..{}", to_text(action),
                       schedule.placement.chain_of(action.stage), range.begin, range.end - 1);
  }
  if (schedule.forward_only && action.kind != ActionKind::kForward) {
    return format_text("{} is a backward, but the schedule is forward-only", to_text(action));
  }
  const int owner = schedule.placement.rank_of(action.stage);
  if (owner != rank) {
    return format_text("{} belongs to rank {}, which holds stage {}", to_text(action), owner,
                       action.stage);
  }
  return {};
}

constexpr uint8_t bit(ActionKind kind) {
  return static_cast<uint8_t>(1U << static_cast<unsigned>(kind));
}
constexpr uint8_t kF = bit(ActionKind::kForward);
constexpr uint8_t kB = bit(ActionKind::kBackward);
constexpr uint8_t kI = bit(ActionKind::kBackwardInput);
constexpr uint8_t kW = bit(ActionKind::kBackwardWeight);

// Marks each action's (kind, stage, microbatch) as seen; reports what does not belong or repeats.
class Census {
 public:
  explicit Census(const Schedule& schedule)
      : schedule_(schedule),
        pairs_(static_cast<size_t>(schedule.num_stages()) *
               static_cast<size_t>(schedule.num_microbatches)),
        seen_(pairs_, 0) {}

  void count(Problems& problems) {
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
      const auto actions = schedule_.rank_actions(rank);
      for (size_t position = 0; position < actions.size(); ++position) {
        count_one(rank, position, actions[position], problems);
      }
    }
  }

  void report_missing(Problems& problems) const {
    const auto m = static_cast<size_t>(schedule_.num_microbatches);
    for (int stage = 0; stage < schedule_.num_stages(); ++stage) {
      const MicrobatchRange range =
          schedule_.placement.microbatches_of(stage, schedule_.num_microbatches);
      for (int microbatch = range.begin; microbatch < range.end; ++microbatch) {
        const uint8_t seen =
            seen_[static_cast<size_t>(stage) * m + static_cast<size_t>(microbatch)];
        if (!is_whole(seen)) report_pair(stage, microbatch, seen, problems);
      }
    }
  }

 private:
  void count_one(int rank, size_t position, const Action& action, Problems& problems) {
    const std::string wrong = misplaced(schedule_, rank, action);
    if (!wrong.empty()) return problems.add_at(rank, position, wrong);
    uint8_t& seen =
        seen_[static_cast<size_t>(action.stage) * static_cast<size_t>(schedule_.num_microbatches) +
              static_cast<size_t>(action.microbatch)];
    if ((seen & bit(action.kind)) != 0) {
      return problems.add_at(rank, position, format_text("{} is repeated", to_text(action)));
    }
    seen = static_cast<uint8_t>(seen | bit(action.kind));
  }

  bool is_whole(uint8_t seen) const {
    return schedule_.forward_only ? seen == kF : seen == (kF | kB) || seen == (kF | kI | kW);
  }

  void report_pair(int stage, int microbatch, uint8_t seen, Problems& problems) const {
    const auto add = [&](ActionKind kind, const char* what) {
      problems.add(format_text("rank {}: {}{}", schedule_.placement.rank_of(stage),
                               to_text({stage, kind, microbatch}), what));
    };
    if ((seen & kF) == 0) add(ActionKind::kForward, " is missing");
    if (schedule_.forward_only) return;
    const bool split = (seen & (kI | kW)) != 0;
    if (split && (seen & kB) != 0) {
      return add(ActionKind::kBackward, " stands beside I or W; a backward is one B, or I and W");
    }
    if (!split && (seen & kB) == 0) add(ActionKind::kBackward, " is missing");
    if (split && (seen & kI) == 0) add(ActionKind::kBackwardInput, " is missing beside its W");
    if (split && (seen & kW) == 0) add(ActionKind::kBackwardWeight, " is missing beside its I");
  }

  const Schedule& schedule_;
  size_t pairs_;
  std::vector<uint8_t> seen_;  // [stage * num_microbatches + microbatch], one bit per kind
};

// Each overlap is a forward and the backward right after it, on one rank, of two microbatches.
void check_overlaps(const Schedule& schedule, Problems& problems) {
  int64_t previous = -1;
  for (const int64_t index : schedule.overlaps) {
    MC_REQUIRE(index > previous && index < static_cast<int64_t>(schedule.actions.size()),
               "overlap index {} is out of order or outside the {} actions", index,
               schedule.actions.size());
    previous = index;
    const auto owner = std::upper_bound(schedule.offsets.begin(), schedule.offsets.end(), index);
    const auto rank = static_cast<int>(owner - schedule.offsets.begin()) - 1;
    const auto actions = schedule.rank_actions(rank);
    const auto position = static_cast<size_t>(index - schedule.offsets[static_cast<size_t>(rank)]);
    const Action& first = actions[position];
    const bool is_pair = position + 1 < actions.size() && first.kind == ActionKind::kForward &&
                         gives_input_gradient(actions[position + 1].kind) &&
                         (first.stage != actions[position + 1].stage ||
                          first.microbatch != actions[position + 1].microbatch);
    if (!is_pair) {
      problems.add_at(
          rank, position,
          format_text("{} is marked to overlap with the action after it; only a forward and "
                      "a backward of something else can",
                      to_text(first)));
    }
  }
}

}  // namespace

void validate(const Schedule& schedule) {
  check_shape(schedule);
  Problems problems;
  Census census(schedule);
  census.count(problems);
  census.report_missing(problems);
  check_overlaps(schedule, problems);
  if (!problems.empty()) throw std::invalid_argument(problems.report(schedule));

  const auto num_run = run_in_order(schedule, [](int64_t, const Action&, const Dependencies&) {});
  if (!is_complete(schedule, num_run)) {
    throw std::invalid_argument(deadlock_report(schedule, num_run));
  }
}

void validate_memory(const Schedule& schedule, std::span<const int64_t> limits) {
  const auto num_ranks = static_cast<size_t>(schedule.num_ranks());
  MC_REQUIRE(limits.size() == 1 || limits.size() == num_ranks,
             "memory_limit has {} entries; give one for all ranks or {}, one per rank",
             limits.size(), num_ranks);
  std::string list;
  std::vector<Mark> marks;
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    const auto actions = schedule.rank_actions(static_cast<int>(rank));
    const int64_t limit = limits[limits.size() == 1 ? 0 : rank];
    int64_t held = 0;
    int64_t peak = 0;
    size_t first = actions.size();
    for (size_t position = 0; position < actions.size(); ++position) {
      if (actions[position].kind == ActionKind::kForward) peak = std::max(peak, ++held);
      if (held > limit) first = std::min(first, position);
      if (frees_activation(actions[position].kind) || schedule.forward_only) --held;
    }
    if (peak <= limit) continue;
    marks.push_back({static_cast<int>(rank), static_cast<int64_t>(first)});
    list += format_text(
        "  rank {} holds up to {} activations, its limit is {}; the first too many is that of {} "
        "at position {}\n",
        rank, peak, limit, to_text(actions[first]), first);
  }
  if (marks.empty()) return;
  throw std::invalid_argument(
      format_text("the schedule does not fit:\n{}{}", list, marked_table(schedule.rows(), marks)));
}

}  // namespace megacore::pipeline
