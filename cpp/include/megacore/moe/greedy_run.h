// One greedy run of the balanced planner by one warp (team_memory.h): one rule, one goal, from the
// initial loads to the end.

#pragma once

#include <cstdint>

#include "megacore/moe/planner_math.h"
#include "megacore/moe/team_memory.h"

namespace megacore::moe {

// The loads that a run starts from.
struct InitialLoads {
  const int64_t* ranks = nullptr;    // (rank,)
  const int64_t* experts = nullptr;  // (expert,)
  int64_t largest_expert = 0;        // its tokens
};

// Every lane holds the same members; arrays are shared by the warp.
template <typename Warp>
class GreedyRun {
 public:
  MC_TEAM_CODE GreedyRun(const Warp& warp, const RunMemory& memory, const PlanShape& shape)
      : warp_(warp), m_(memory), shape_(shape) {}

  // Runs `rule` towards `goal`. False as soon as it is sure that a rank ends above `limit`: the run
  // then stops half way. REQUIRES: goal <= limit.
  MC_TEAM_CODE bool run(
      Rule rule, int64_t goal, int64_t limit, int64_t domain_size, const InitialLoads& initial) {
    reset(rule, goal, limit, initial);
    // Inside each domain first, then across all of them, which one domain for all need not.
    const int64_t num_domains = shape_.num_ranks / domain_size;
    for (int64_t i = num_domains > 1 ? 0 : num_domains; i <= num_domains; ++i) {
      const bool is_last = i == num_domains;
      run_within(is_last ? 0 : i * domain_size, is_last ? shape_.num_ranks : (i + 1) * domain_size);
    }
    return shortage_ <= 0;
  }

  MC_TEAM_CODE Score score(int64_t least_load, int64_t domain_size) const {
    uint64_t max_load = 0;
    uint64_t sends = 0;
    for (int64_t p = warp_.lane(); p < shape_.num_ranks; p += warp_.lanes()) {
      max_load = most(max_load, static_cast<uint64_t>(m_.load[p]));
      sends = most(sends, static_cast<uint64_t>(m_.sends[p]));
    }
    int64_t clones = 0;
    int64_t crossings = 0;
    for (int64_t i = warp_.lane(); i < shape_.num_slots(); i += warp_.lanes()) {
      if (m_.clones.expert[i] >= 0) {
        if (domain_size < shape_.num_ranks) {  // else there are none, and divisions are slow
          const int64_t home = shape_.home(m_.clones.expert[i]);
          const int64_t rank = i / shape_.num_spare_slots;
          crossings += home / domain_size != rank / domain_size ? 1 : 0;
        }
        ++clones;
      }
    }
    const auto reached = static_cast<int64_t>(warp_.max(max_load));
    return {.load = larger(reached, least_load),
            .crossings = warp_.sum(crossings),
            .clones = warp_.sum(clones),
            .sends = static_cast<int64_t>(warp_.max(sends)),
            .max_load = reached};
  }

 private:
  MC_TEAM_CODE static uint64_t most(uint64_t a, uint64_t b) { return a > b ? a : b; }
  MC_TEAM_CODE int64_t surplus(int64_t rank) const { return m_.load[rank] - goal_; }
  MC_TEAM_CODE bool can_receive(int64_t rank) const { return m_.receiver[rank] != 0; }

  // Keeps the keys of a rank in step with its load and its slots.
  MC_TEAM_CODE void enlist(int64_t rank, int64_t load, int64_t slots_left) const {
    m_.donor[rank] = load > goal_ ? most_key(load - goal_, rank) : 0;
    m_.receiver[rank] = load < goal_ && slots_left > 0 ? most_key(goal_ - load, rank) : 0;
  }

  // What the rank has above the limit, less what it can still take: its room below the goal, or as
  // often the largest expert as it has slots. The sum over ranks never falls: what leaves a rank
  // above the limit is taken by one below the goal.
  MC_TEAM_CODE int64_t shortage(int64_t load, int64_t slots_left) const {
    const int64_t room = smaller(larger(0, goal_ - load), slots_left * largest_expert_);
    return larger(0, load - limit_) - room;
  }

  MC_TEAM_CODE void reset(Rule rule, int64_t goal, int64_t limit, const InitialLoads& initial) {
    rule_ = rule;
    goal_ = goal;
    limit_ = limit;
    largest_expert_ = initial.largest_expert;
    int64_t all_short = 0;
    for (int64_t p = warp_.lane(); p < shape_.num_ranks; p += warp_.lanes()) {
      m_.load[p] = initial.ranks[p];
      m_.slots_left[p] = shape_.num_spare_slots;
      m_.sends[p] = 0;
      m_.largest[p] = 0;
      enlist(p, initial.ranks[p], shape_.num_spare_slots);
      all_short += shortage(initial.ranks[p], shape_.num_spare_slots);
    }
    shortage_ = warp_.sum(all_short);
    for (int64_t e = warp_.lane(); e < shape_.num_experts; e += warp_.lanes()) {
      m_.remaining[e] = initial.experts[e];
    }
    for (int64_t i = warp_.lane(); i < shape_.num_slots(); i += warp_.lanes()) {
      m_.clones.expert[i] = -1;
      m_.clones.tokens[i] = 0;
    }
    warp_.sync();
    if (rule == Rule::kBestFill) {
      const int64_t per_rank = shape_.experts_per_rank();
      for (int64_t p = warp_.lane(); p < shape_.num_ranks; p += warp_.lanes()) {
        int64_t largest = 0;
        for (int64_t i = 0; i < per_rank; ++i) {
          largest = larger(largest, m_.remaining[p * per_rank + i]);
        }
        m_.largest[p] = largest;
      }
      warp_.sync();
    }
  }

  MC_TEAM_CODE void run_within(int64_t begin, int64_t end) {
    if (rule_ == Rule::kBudgeted) {
      spare_room_ = room_to_waste(begin, end);
    }
    int64_t donor = -1;
    int64_t receiver = -1;  // kept with its donor under kWholeRank
    while (shortage_ <= 0) {
      Move wanted;
      if (rule_ == Rule::kWholeRank && receiver >= 0 && can_receive(receiver)) {
        wanted = {receiver, goal_ - m_.load[receiver]};
      } else {
        const Receiver widest = widest_slack(begin, end);
        const bool keep_donor = rule_ == Rule::kTightFit && donor >= 0 && surplus(donor) > 0;
        if (!keep_donor) {
          donor = donor_for(widest, begin, end);
        }
        if (donor < 0 || widest.rank < 0) {
          return;
        }
        const int64_t need = surplus(donor);
        const bool fits_tightly = (rule_ == Rule::kTightFit || rule_ == Rule::kBudgeted) &&
                                  widest.slack >= need;  // else no slack covers it
        const Receiver tightest = fits_tightly ? tightest_slack(need, begin, end) : Receiver{};
        wanted = choose_move(rule_, need, widest, tightest, spare_room_);
        receiver = wanted.receiver;
      }
      move(donor, wanted);
    }
  }

  // The rank with the largest surplus, -1 if there is no donor; under kBestFill the one that fills
  // `widest` best, the surplus deciding between equals.
  MC_TEAM_CODE int64_t donor_for(Receiver widest, int64_t begin, int64_t end) const {
    uint64_t best = most_of(m_.donor, begin, end);
    if (best == 0) {
      return -1;
    }
    // Often the largest expert of the fullest rank fills the slack: no other donor is better.
    if (rule_ == Rule::kBestFill && m_.largest[index_of_most(best)] < widest.slack) {
      const int64_t best_fill = smaller(largest_of_donors(begin, end), widest.slack);
      best = 0;
      for (int64_t p = begin + warp_.lane(); p < end; p += warp_.lanes()) {
        best = most(best, m_.largest[p] >= best_fill ? m_.donor[p] : 0);
      }
      best = warp_.max(best);
    }
    return index_of_most(best);
  }

  MC_TEAM_CODE uint64_t most_of(const uint64_t* keys, int64_t begin, int64_t end) const {
    uint64_t best = 0;
    for (int64_t p = begin + warp_.lane(); p < end; p += warp_.lanes()) {
      best = most(best, keys[p]);
    }
    return warp_.max(best);
  }

  MC_TEAM_CODE int64_t largest_of_donors(int64_t begin, int64_t end) const {
    uint64_t largest = 0;
    for (int64_t p = begin + warp_.lane(); p < end; p += warp_.lanes()) {
      largest = most(largest, m_.donor[p] != 0 ? static_cast<uint64_t>(m_.largest[p]) : 0);
    }
    return static_cast<int64_t>(warp_.max(largest));
  }

  MC_TEAM_CODE Receiver widest_slack(int64_t begin, int64_t end) const {
    const uint64_t best = most_of(m_.receiver, begin, end);
    return best == 0 ? Receiver{} : receiver_of(index_of_most(best), best);
  }

  // The tightest slack that is at least `need` >= 1.
  MC_TEAM_CODE Receiver tightest_slack(int64_t need, int64_t begin, int64_t end) const {
    const uint64_t from = least_key(need, 0);
    uint64_t best = ~uint64_t{0};
    for (int64_t p = begin + warp_.lane(); p < end; p += warp_.lanes()) {
      // key ^ kIndexMask is least_key. Below `from` the difference wraps round to at least 2^63.
      const uint64_t above = (m_.receiver[p] ^ kIndexMask) - from;
      best = above < best ? above : best;
    }
    best = warp_.min(best);
    return best >> 63 != 0 ? Receiver{} : receiver_of(index_of_least(best + from), best + from);
  }

  MC_TEAM_CODE Receiver receiver_of(int64_t rank, uint64_t key) const {
    return {rank, static_cast<int64_t>(key >> kIndexBits), m_.slots_left[rank]};
  }

  MC_TEAM_CODE int64_t room_to_waste(int64_t begin, int64_t end) const {
    int64_t room = 0;
    for (int64_t p = begin + warp_.lane(); p < end; p += warp_.lanes()) {
      if (surplus(p) > 0 || m_.slots_left[p] > 0) {
        room -= surplus(p);
      }
    }
    return warp_.sum(room);
  }

  MC_TEAM_CODE void move(int64_t donor, Move wanted) {
    const int64_t per_rank = shape_.experts_per_rank();
    const int64_t first = donor * per_rank;
    uint64_t best = 0;
    for (int64_t i = warp_.lane(); i < per_rank; i += warp_.lanes()) {
      best = most(best, expert_key(m_.remaining[first + i], wanted.tokens, i));
    }
    const int64_t expert = first + index_of_most(warp_.max(best));
    const int64_t to = wanted.receiver;
    const int64_t tokens = smaller(wanted.tokens, m_.remaining[expert]);
    const int64_t slots = m_.slots_left[to];
    const int64_t load = m_.load[to] + tokens;
    const int64_t donor_load = m_.load[donor] - tokens;
    const int64_t donor_slots = m_.slots_left[donor];
    shortage_ += shortage(donor_load, donor_slots) - shortage(donor_load + tokens, donor_slots);
    shortage_ += shortage(load, slots - 1) - shortage(load - tokens, slots);
    warp_.sync();  // all have read before one writes
    if (warp_.lane() == 0) {
      const int64_t slot = (to + 1) * shape_.num_spare_slots - slots;
      m_.clones.expert[slot] = expert;
      m_.clones.tokens[slot] = tokens;
      m_.remaining[expert] -= tokens;
      m_.load[donor] = donor_load;
      m_.load[to] = load;
      m_.slots_left[to] = slots - 1;
      ++m_.sends[donor];
      enlist(donor, donor_load, donor_slots);
      enlist(to, load, slots - 1);
    }
    warp_.sync();
    if (rule_ == Rule::kBudgeted && slots == 1) {
      spare_room_ -= goal_ - load;
    }
    if (rule_ == Rule::kBestFill) {
      uint64_t largest = 0;
      for (int64_t i = warp_.lane(); i < per_rank; i += warp_.lanes()) {
        largest = most(largest, static_cast<uint64_t>(m_.remaining[first + i]));
      }
      largest = warp_.max(largest);
      if (warp_.lane() == 0) {
        m_.largest[donor] = static_cast<int64_t>(largest);
      }
      warp_.sync();
    }
  }

  Warp warp_;
  RunMemory m_;
  PlanShape shape_;
  Rule rule_ = Rule::kTightFit;
  int64_t goal_ = 0;
  int64_t limit_ = 0;
  int64_t largest_expert_ = 0;
  int64_t shortage_ = 0;  // of all ranks; above 0 the limit is out of reach
  int64_t spare_room_ = 0;
};

}  // namespace megacore::moe
