#include "megacore/moe/balanced.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "greedy_run.h"
#include "megacore/base/check.h"

namespace megacore::moe {
namespace {

struct Outcome {
  Score score;
  Rule rule = Rule::kTightFit;
  std::vector<Clone> clones;
};

class Race {
 public:
  Race(const Loads& loads, const BalancedSpec& spec, int64_t goal)
      : run_(loads, spec), goal_(goal) {}

  // All rules towards `goal`; keeps the best outcome of all goals so far, the earlier of equals.
  // Runs are given up when they are sure to be worse.
  void enter(int64_t goal) {
    for (int index = 0; index < kNumRules; ++index) {
      const auto rule = static_cast<Rule>(index);
      const bool is_first = num_runs_++ == 0;
      const int64_t limit = is_first ? std::numeric_limits<int64_t>::max() : best_.score.load;
      if (!run_.run(rule, goal, limit)) {
        continue;
      }
      const Score score = run_.score(goal_);
      if (is_first || better(score, best_.score)) {
        best_ = {score, rule, run_.clones()};
      }
    }
  }

  // Goals between the one missed and the load reached, a round at a time; a round's goals do not
  // depend on each other, so that they could run side by side.
  void refine() {
    int64_t missed = goal_;
    for (int round = 0; round < kRefinementRounds; ++round) {
      const int64_t reached = best_.score.max_load;
      int64_t previous = missed;
      for (int64_t index = 0; index < kGoalsPerRound; ++index) {
        const int64_t goal = refined_goal(missed, reached, index);
        if (goal > previous) {
          enter(goal);
          previous = goal;
        }
      }
      missed = highest_missed(missed, reached);
    }
  }

  const Outcome& best() const { return best_; }
  int64_t num_runs() const { return num_runs_; }

 private:
  // The highest goal of a round that is still below the best load.
  int64_t highest_missed(int64_t missed, int64_t reached) const {
    int64_t highest = missed;
    for (int64_t index = 0; index < kGoalsPerRound; ++index) {
      const int64_t goal = refined_goal(missed, reached, index);
      highest = goal < best_.score.max_load ? larger(highest, goal) : highest;
    }
    return highest;
  }

  GreedyRun run_;
  int64_t goal_;
  Outcome best_;
  int64_t num_runs_ = 0;
};

}  // namespace

BalancedClones plan_balanced(const Loads& loads, const BalancedSpec& spec) {
  const auto num_ranks = static_cast<int64_t>(loads.ranks.size());
  const auto experts_per_rank = static_cast<int64_t>(loads.experts.size()) / num_ranks;
  const int64_t goal = goal_load(loads.total, num_ranks, spec.tolerance_per_million);
  Race race(loads, spec, goal);
  race.enter(goal);
  if (race.best().score.max_load > goal) {
    MC_INVARIANT(spec.num_spare_slots < experts_per_rank,
                 "a rank is left with ",
                 race.best().score.max_load,
                 " tokens, above the guaranteed ",
                 goal);
    race.refine();
  }
  BalancedClones result{.clones = race.best().clones,
                        .goal = goal,
                        .max_load = race.best().score.max_load,
                        .rule = race.best().rule,
                        .num_runs = race.num_runs()};
  std::sort(result.clones.begin(), result.clones.end(), [](const Clone& a, const Clone& b) {
    return a.rank != b.rank ? a.rank < b.rank : a.slot < b.slot;
  });
  return result;
}

}  // namespace megacore::moe
