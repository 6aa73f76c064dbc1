#include "greedy_run.h"

#include <algorithm>
#include <limits>

#include "megacore/base/check.h"

namespace megacore::moe {

GreedyRun::GreedyRun(const Loads& loads, const BalancedSpec& spec)
    : initial_(loads),
      spec_(spec),
      num_ranks_(static_cast<int64_t>(loads.ranks.size())),
      experts_per_rank_(static_cast<int64_t>(loads.experts.size()) / num_ranks_),
      load_(loads.ranks.size()),
      slots_left_(loads.ranks.size()),
      remaining_(loads.experts.size()),
      largest_(loads.ranks.size()),
      sends_(loads.ranks.size()) {}

void GreedyRun::reset(Rule rule, int64_t goal) {
  rule_ = rule;
  goal_ = goal;
  std::copy(initial_.ranks.begin(), initial_.ranks.end(), load_.begin());
  std::copy(initial_.experts.begin(), initial_.experts.end(), remaining_.begin());
  std::fill(slots_left_.begin(), slots_left_.end(), spec_.num_spare_slots);
  std::fill(sends_.begin(), sends_.end(), 0);
  clones_.clear();
  if (rule == Rule::kBestFill) {
    auto expert = remaining_.begin();
    for (int64_t& largest : largest_) {
      largest = *std::max_element(expert, expert + experts_per_rank_);
      expert += experts_per_rank_;
    }
  }
}

void GreedyRun::run(Rule rule, int64_t goal) {
  reset(rule, goal);
  if (spec_.domain_size < num_ranks_) {
    for (int64_t first = 0; first < num_ranks_; first += spec_.domain_size) {
      run_within({first, first + spec_.domain_size});
    }
  }
  run_within({0, num_ranks_});
}

void GreedyRun::run_within(RankRange range) {
  if (rule_ == Rule::kBudgeted) {
    spare_room_ = room_to_waste(range);
  }
  int64_t donor = -1;
  int64_t receiver = -1;  // kept with its donor under kWholeRank
  while (true) {
    const bool keep_pair =
        rule_ == Rule::kWholeRank && receiver >= 0 && can_receive(static_cast<size_t>(receiver));
    if (keep_pair) {
      const auto kept = static_cast<size_t>(receiver);
      move(donor, {receiver, goal_ - load_[kept]});
      continue;
    }
    const Receiver widest = widest_slack(range);
    const bool keep_donor =
        rule_ == Rule::kTightFit && donor >= 0 && surplus(static_cast<size_t>(donor)) > 0;
    if (!keep_donor) {
      donor = donor_for(widest, range);
    }
    if (donor < 0 || widest.rank < 0) {
      return;
    }
    const int64_t need = surplus(static_cast<size_t>(donor));
    const bool fits_tightly = rule_ == Rule::kTightFit || rule_ == Rule::kBudgeted;
    const Receiver tightest = fits_tightly ? tightest_slack(need, range) : Receiver{};
    const Move wanted = choose_move(rule_, need, widest, tightest, spare_room_);
    receiver = wanted.receiver;
    move(donor, wanted);
  }
}

// The rank with the largest surplus; under kBestFill the one that fills `widest` best, the surplus
// deciding between equals. -1 where no rank is above the goal.
int64_t GreedyRun::donor_for(Receiver widest, RankRange range) const {
  int64_t best_fill = 0;
  uint64_t best_key = 0;
  for (int64_t rank = range.begin; rank < range.end; ++rank) {
    const auto p = static_cast<size_t>(rank);
    if (surplus(p) <= 0) {
      continue;
    }
    const uint64_t key = most_key(surplus(p), rank);
    const int64_t fill = rule_ == Rule::kBestFill ? smaller(largest_[p], widest.slack) : 0;
    if (fill > best_fill || (fill == best_fill && key > best_key)) {
      best_fill = fill;
      best_key = key;
    }
  }
  return best_key == 0 ? -1 : index_of_most(best_key);
}

Receiver GreedyRun::widest_slack(RankRange range) const {
  uint64_t best = 0;
  for (int64_t rank = range.begin; rank < range.end; ++rank) {
    const auto p = static_cast<size_t>(rank);
    if (can_receive(p)) {
      best = std::max(best, most_key(goal_ - load_[p], rank));
    }
  }
  if (best == 0) {
    return {};
  }
  const int64_t rank = index_of_most(best);
  const auto p = static_cast<size_t>(rank);
  return {rank, goal_ - load_[p], slots_left_[p]};
}

Receiver GreedyRun::tightest_slack(int64_t surplus, RankRange range) const {
  constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();
  uint64_t best = kNone;
  for (int64_t rank = range.begin; rank < range.end; ++rank) {
    const auto p = static_cast<size_t>(rank);
    if (slots_left_[p] > 0 && goal_ - load_[p] >= surplus) {
      best = std::min(best, least_key(goal_ - load_[p], rank));
    }
  }
  if (best == kNone) {
    return {};
  }
  const int64_t rank = index_of_least(best);
  const auto p = static_cast<size_t>(rank);
  return {rank, goal_ - load_[p], slots_left_[p]};
}

int64_t GreedyRun::room_to_waste(RankRange range) const {
  int64_t room = 0;
  for (int64_t rank = range.begin; rank < range.end; ++rank) {
    const auto p = static_cast<size_t>(rank);
    if (surplus(p) > 0 || slots_left_[p] > 0) {
      room -= surplus(p);
    }
  }
  return room;
}

int64_t GreedyRun::choose_expert(int64_t donor, int64_t wanted) const {
  uint64_t best = 0;
  const int64_t first = donor * experts_per_rank_;
  for (int64_t i = 0; i < experts_per_rank_; ++i) {
    best = std::max(best, expert_key(remaining_[static_cast<size_t>(first + i)], wanted, i));
  }
  MC_INVARIANT(best != 0, "rank ", donor, " is to give tokens, but has none of its own");
  return first + index_of_most(best);
}

void GreedyRun::move(int64_t donor, Move wanted) {
  const int64_t expert = choose_expert(donor, wanted.tokens);
  const auto e = static_cast<size_t>(expert);
  const auto from = static_cast<size_t>(donor);
  const auto to = static_cast<size_t>(wanted.receiver);
  const int64_t tokens = smaller(wanted.tokens, remaining_[e]);
  clones_.push_back({expert, wanted.receiver, spec_.num_spare_slots - slots_left_[to], tokens});
  remaining_[e] -= tokens;
  load_[from] -= tokens;
  load_[to] += tokens;
  --slots_left_[to];
  ++sends_[from];
  if (rule_ == Rule::kBudgeted && slots_left_[to] == 0) {
    spare_room_ -= goal_ - load_[to];
  }
  if (rule_ == Rule::kBestFill) {
    const auto first = remaining_.begin() + donor * experts_per_rank_;
    largest_[from] = *std::max_element(first, first + experts_per_rank_);
  }
}

Score GreedyRun::score(int64_t least_load) const {
  const int64_t max_load = *std::max_element(load_.begin(), load_.end());
  int64_t crossings = 0;
  for (const Clone& clone : clones_) {
    const int64_t home = clone.expert / experts_per_rank_;
    crossings += home / spec_.domain_size != clone.rank / spec_.domain_size ? 1 : 0;
  }
  return {.load = larger(max_load, least_load),
          .crossings = crossings,
          .clones = static_cast<int64_t>(clones_.size()),
          .sends = *std::max_element(sends_.begin(), sends_.end()),
          .max_load = max_load};
}

}  // namespace megacore::moe
