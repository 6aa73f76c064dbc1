// One greedy run of the balanced planner by one warp: the device version of GreedyRun
// (greedy_run.h), with the same comments. A warp reduces the same keys instead of loops over ranks
// or experts.

#pragma once

#include <cstdint>

#include "megacore/moe/planner_math.h"
#include "megacore/moe/team_memory.h"

namespace megacore::moe {

// Every lane holds the same members; arrays are shared by the warp.
template <typename Warp>
class TeamGreedyRun {
 public:
  MC_TEAM_CODE TeamGreedyRun(const Warp& warp, const RunMemory& memory, const PlanShape& shape)
      : warp_(warp), m_(memory), shape_(shape) {}

  MC_TEAM_CODE void run(
      Rule rule, int64_t goal, int64_t domain_size, const int64_t* ranks, const int64_t* experts) {
    reset(rule, goal, ranks, experts);
    // Inside each domain first, then across all of them, which one domain for all need not.
    const int64_t num_domains = shape_.num_ranks / domain_size;
    for (int64_t i = num_domains > 1 ? 0 : num_domains; i <= num_domains; ++i) {
      const bool is_last = i == num_domains;
      run_within(is_last ? 0 : i * domain_size, is_last ? shape_.num_ranks : (i + 1) * domain_size);
    }
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
        const int64_t home = shape_.home(m_.clones.expert[i]);
        const int64_t rank = i / shape_.num_spare_slots;
        crossings += home / domain_size != rank / domain_size ? 1 : 0;
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
  MC_TEAM_CODE bool can_receive(int64_t rank) const {
    return m_.slots_left[rank] > 0 && m_.load[rank] < goal_;
  }

  MC_TEAM_CODE void reset(Rule rule, int64_t goal, const int64_t* ranks, const int64_t* experts) {
    rule_ = rule;
    goal_ = goal;
    for (int64_t p = warp_.lane(); p < shape_.num_ranks; p += warp_.lanes()) {
      m_.load[p] = ranks[p];
      m_.slots_left[p] = shape_.num_spare_slots;
      m_.sends[p] = 0;
      m_.largest[p] = 0;
    }
    for (int64_t e = warp_.lane(); e < shape_.num_experts; e += warp_.lanes()) {
      m_.remaining[e] = experts[e];
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
    while (true) {
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
        const bool fits_tightly = rule_ == Rule::kTightFit || rule_ == Rule::kBudgeted;
        const Receiver tightest = fits_tightly ? tightest_slack(need, begin, end) : Receiver{};
        wanted = choose_move(rule_, need, widest, tightest, spare_room_);
        receiver = wanted.receiver;
      }
      move(donor, wanted);
    }
  }

  MC_TEAM_CODE int64_t donor_for(Receiver widest, int64_t begin, int64_t end) const {
    uint64_t best_fill = 0;
    if (rule_ == Rule::kBestFill) {
      for (int64_t p = begin + warp_.lane(); p < end; p += warp_.lanes()) {
        if (surplus(p) > 0) {
          best_fill = most(best_fill, static_cast<uint64_t>(smaller(m_.largest[p], widest.slack)));
        }
      }
      best_fill = warp_.max(best_fill);
    }
    uint64_t best = 0;
    for (int64_t p = begin + warp_.lane(); p < end; p += warp_.lanes()) {
      const bool fills = rule_ != Rule::kBestFill ||
                         static_cast<uint64_t>(smaller(m_.largest[p], widest.slack)) == best_fill;
      if (surplus(p) > 0 && fills) {
        best = most(best, most_key(surplus(p), p));
      }
    }
    best = warp_.max(best);
    return best == 0 ? -1 : index_of_most(best);
  }

  MC_TEAM_CODE Receiver widest_slack(int64_t begin, int64_t end) const {
    uint64_t best = 0;
    for (int64_t p = begin + warp_.lane(); p < end; p += warp_.lanes()) {
      if (can_receive(p)) {
        best = most(best, most_key(goal_ - m_.load[p], p));
      }
    }
    best = warp_.max(best);
    return best == 0 ? Receiver{} : receiver_at(index_of_most(best));
  }

  MC_TEAM_CODE Receiver tightest_slack(int64_t need, int64_t begin, int64_t end) const {
    constexpr uint64_t kNone = ~uint64_t{0};
    uint64_t best = kNone;
    for (int64_t p = begin + warp_.lane(); p < end; p += warp_.lanes()) {
      if (m_.slots_left[p] > 0 && goal_ - m_.load[p] >= need) {
        const uint64_t key = least_key(goal_ - m_.load[p], p);
        best = key < best ? key : best;
      }
    }
    best = warp_.min(best);
    return best == kNone ? Receiver{} : receiver_at(index_of_least(best));
  }

  MC_TEAM_CODE Receiver receiver_at(int64_t rank) const {
    return {rank, goal_ - m_.load[rank], m_.slots_left[rank]};
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
    warp_.sync();  // all have read before one writes
    if (warp_.lane() == 0) {
      const int64_t slot = (to + 1) * shape_.num_spare_slots - slots;
      m_.clones.expert[slot] = expert;
      m_.clones.tokens[slot] = tokens;
      m_.remaining[expert] -= tokens;
      m_.load[donor] -= tokens;
      m_.load[to] = load;
      m_.slots_left[to] = slots - 1;
      ++m_.sends[donor];
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
  int64_t spare_room_ = 0;
};

}  // namespace megacore::moe
