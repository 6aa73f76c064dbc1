#include "greedy_run.h"

#include <algorithm>
#include <limits>

#include "megacore/base/check.h"

namespace megacore::moe {
namespace {

// The most of key(i), i < count, or 0; four at a time, since each step of one waits for the last.
template <typename Key>
uint64_t most_over(size_t count, const Key& key) {
  uint64_t a = 0;
  uint64_t b = 0;
  uint64_t c = 0;
  uint64_t d = 0;
  size_t i = 0;
  for (; i + 4 <= count; i += 4) {
    a = std::max(a, key(i));
    b = std::max(b, key(i + 1));
    c = std::max(c, key(i + 2));
    d = std::max(d, key(i + 3));
  }
  for (; i < count; ++i) {
    a = std::max(a, key(i));
  }
  return std::max(std::max(a, b), std::max(c, d));
}

}  // namespace

void RankValues::clear() {
  keys_.clear();
  std::fill(place_.begin(), place_.end(), kAbsent);
}

int64_t RankValues::most() const {
  // key ^ kIndexMask is most_key of the same rank and value.
  return index_of_most(most_over(keys_.size(), [this](size_t i) { return keys_[i] ^ kIndexMask; }));
}

int64_t RankValues::least_from(int64_t least) const {
  const uint64_t from = least_key(least, 0);
  const uint64_t inverse =
      most_over(keys_.size(), [&](size_t i) { return keys_[i] >= from ? ~keys_[i] : 0; });
  return inverse == 0 ? -1 : index_of_least(~inverse);
}

GreedyRun::GreedyRun(const Loads& loads, const BalancedSpec& spec)
    : initial_(loads),
      spec_(spec),
      num_ranks_(static_cast<int64_t>(loads.ranks.size())),
      experts_per_rank_(static_cast<int64_t>(loads.experts.size()) / num_ranks_),
      largest_expert_(*std::max_element(loads.experts.begin(), loads.experts.end())),
      load_(loads.ranks.size()),
      slots_left_(loads.ranks.size()),
      remaining_(loads.experts.size()),
      largest_(loads.ranks.size()),
      sends_(loads.ranks.size()),
      donors_(loads.ranks.size()),
      receivers_(loads.ranks.size()) {}

void GreedyRun::reset(Rule rule, int64_t goal, int64_t limit) {
  rule_ = rule;
  goal_ = goal;
  limit_ = limit;
  std::copy(initial_.ranks.begin(), initial_.ranks.end(), load_.begin());
  std::copy(initial_.experts.begin(), initial_.experts.end(), remaining_.begin());
  std::fill(slots_left_.begin(), slots_left_.end(), spec_.num_spare_slots);
  std::fill(sends_.begin(), sends_.end(), 0);
  clones_.clear();
  shortage_ = 0;
  for (int64_t rank = 0; rank < num_ranks_; ++rank) {
    shortage_ += shortage(rank);
  }
  if (rule == Rule::kBestFill) {
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      largest_[static_cast<size_t>(rank)] = most_remaining(rank);
    }
  }
}

bool GreedyRun::run(Rule rule, int64_t goal, int64_t limit) {
  reset(rule, goal, limit);
  if (spec_.domain_size < num_ranks_) {
    for (int64_t first = 0; first < num_ranks_; first += spec_.domain_size) {
      run_within({first, first + spec_.domain_size});
    }
  }
  run_within({0, num_ranks_});
  return shortage_ <= 0;
}

// What the rank has above the limit, less what it can still take: its room below the goal, or as
// often the largest expert as it has slots. The sum over ranks never falls: what leaves a rank
// above the limit is taken by one below the goal.
int64_t GreedyRun::shortage(int64_t rank) const {
  const auto p = static_cast<size_t>(rank);
  const int64_t room =
      can_receive(p) ? smaller(goal_ - load_[p], slots_left_[p] * largest_expert_) : 0;
  return larger(0, load_[p] - limit_) - room;
}

void GreedyRun::run_within(RankRange range) {
  if (rule_ == Rule::kBudgeted) {
    spare_room_ = room_to_waste(range);
  }
  donors_.clear();
  receivers_.clear();
  for (int64_t rank = range.begin; rank < range.end; ++rank) {
    enlist(rank);
  }
  int64_t donor = -1;
  int64_t receiver = -1;  // kept with its donor under kWholeRank
  while (shortage_ <= 0) {
    const bool keep_pair =
        rule_ == Rule::kWholeRank && receiver >= 0 && can_receive(static_cast<size_t>(receiver));
    if (keep_pair) {
      const auto kept = static_cast<size_t>(receiver);
      move(donor, {receiver, goal_ - load_[kept]});
      continue;
    }
    if (donors_.empty() || receivers_.empty()) {
      return;
    }
    const Receiver widest = receiver_at(receivers_.most());
    const bool keep_donor =
        rule_ == Rule::kTightFit && donor >= 0 && surplus(static_cast<size_t>(donor)) > 0;
    if (!keep_donor) {
      donor = donor_for(widest);
    }
    const int64_t need = surplus(static_cast<size_t>(donor));
    const bool fits_tightly = rule_ == Rule::kTightFit || rule_ == Rule::kBudgeted;
    const int64_t tightest = fits_tightly ? receivers_.least_from(need) : -1;
    const Move wanted = choose_move(
        rule_, need, widest, tightest < 0 ? Receiver{} : receiver_at(tightest), spare_room_);
    receiver = wanted.receiver;
    move(donor, wanted);
  }
}

// Puts a rank among donors, receivers or neither, by its load and its slots.
void GreedyRun::enlist(int64_t rank) {
  const auto p = static_cast<size_t>(rank);
  if (surplus(p) > 0) {
    donors_.put(rank, surplus(p));
  } else {
    donors_.drop(rank);
  }
  if (can_receive(p)) {
    receivers_.put(rank, -surplus(p));
  } else {
    receivers_.drop(rank);
  }
}

// The rank with the largest surplus; under kBestFill the one that fills `widest` best, the surplus
// deciding between equals. REQUIRES: there is a donor.
int64_t GreedyRun::donor_for(Receiver widest) const {
  if (rule_ != Rule::kBestFill) {
    return donors_.most();
  }
  int64_t largest = 0;
  donors_.for_each([&](int64_t rank, int64_t) {
    largest = larger(largest, largest_[static_cast<size_t>(rank)]);
  });
  const int64_t best_fill = smaller(largest, widest.slack);
  uint64_t best = 0;
  donors_.for_each([&](int64_t rank, int64_t surplus) {
    const bool fills = largest_[static_cast<size_t>(rank)] >= best_fill;
    best = std::max(best, fills ? most_key(surplus, rank) : 0);
  });
  return index_of_most(best);
}

Receiver GreedyRun::receiver_at(int64_t rank) const {
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
  shortage_ -= shortage(donor) + shortage(wanted.receiver);
  clones_.push_back({expert, wanted.receiver, spec_.num_spare_slots - slots_left_[to], tokens});
  remaining_[e] -= tokens;
  load_[from] -= tokens;
  load_[to] += tokens;
  --slots_left_[to];
  ++sends_[from];
  shortage_ += shortage(donor) + shortage(wanted.receiver);
  if (rule_ == Rule::kBudgeted && slots_left_[to] == 0) {
    spare_room_ -= goal_ - load_[to];
  }
  if (rule_ == Rule::kBestFill) {
    largest_[from] = most_remaining(donor);
  }
  enlist(donor);
  enlist(wanted.receiver);
}

int64_t GreedyRun::most_remaining(int64_t rank) const {
  const auto first = remaining_.begin() + rank * experts_per_rank_;
  return *std::max_element(first, first + experts_per_rank_);
}

Score GreedyRun::score(int64_t least_load) const {
  const int64_t max_load = *std::max_element(load_.begin(), load_.end());
  int64_t crossings = 0;
  if (spec_.domain_size < num_ranks_) {  // else there are none, and divisions are slow
    for (const Clone& clone : clones_) {
      const int64_t home = clone.expert / experts_per_rank_;
      crossings += home / spec_.domain_size != clone.rank / spec_.domain_size ? 1 : 0;
    }
  }
  return {.load = larger(max_load, least_load),
          .crossings = crossings,
          .clones = static_cast<int64_t>(clones_.size()),
          .sends = *std::max_element(sends_.begin(), sends_.end()),
          .max_load = max_load};
}

}  // namespace megacore::moe
