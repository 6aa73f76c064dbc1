// The offload planners for a team of threads: one block of a GPU, or one thread of the CPU. Plans
// do not depend on the team. Nothing is allocated and nothing throws.
//
// Balanced. The goal is the average load plus a tolerance. A step moves tokens of one expert from a
// rank above the goal (donor) to a rank below it with a free slot (receiver). Unlike in the
// echo planner, a donor may give more than its surplus and take tokens of another rank later,
// so that slots are fully used. Four rules for the choice of donor, receiver and amount run to
// completion; the best result is used. If none reached the goal, which happens with few slots and
// very uneven loads, further goals between it and the best load are tried.
//
// Two invariants simplify the steps. A donor has received nothing before: receivers stop at the
// goal. And after a step the expert, the receiver or the donor is exhausted, so no rank ever holds
// two copies of one expert.
//
// Bound. With at least as many slots as experts per rank, the goal is always reached: under
// Rule::kWholeRank the most loaded rank h fills the least loaded rank u alone. h has only its own
// tokens, and more than the goal, so they suffice; at most experts_per_rank of its experts are
// cloned to u, whose slots were all free; u ends exactly at the goal. Each such fill reduces the
// number of ranks below the goal by one, and while a rank is above the goal one is below it.
//
// Echo. Ranks above the average spill tokens, the hottest experts first; ranks below it have
// room. Both are sorted, largest first, and laid on one line as intervals; where a spilled chunk
// overlaps a room, that many tokens move: one pass, no search. Each rank keeps the largest of its
// pieces, one per spare slot; the rest stays at home.
//
//   loads of 4 ranks        500 200 300 400        average, rounded down: 350
//   room                      0 150  50   0
//   spilled per rank        150   0   0  50
//
// Where the documents are ambiguous: sorts are stable and the lowest index wins a tie; pieces
// without room or slot stay on the home expert; all arithmetic is exact in integers.
// Source: Megatron-LM pull request 2368 ("ECHO"), arXiv:2603.07685 section 4.3.7.
//
// Sources. Of the tokens of a clone every source gives its proportional share, rounded down; the
// remainder is taken source by source in rank order. With the balanced planner a clone first gets
// the tokens of its own rank and the home expert keeps those of its own rank.
//
// In parallel: rules and goals by one warp each; the echo planner without sorting, since
// where an expert or a rank lies on the line is a sum over those before it; the split of an
// expert's tokens over its sources by one warp per expert (the CPU has its own code for this split,
// in the order of its memory: split_sources.h). O(runs * slots * (ranks + experts per
// rank)) for the balanced planner; runs is 4 if the goal is reached at once and at most 100.

#pragma once

#include <cstdint>

#include "megacore/moe/greedy_run.h"
#include "megacore/moe/plan_spec.h"
#include "megacore/moe/planner_math.h"
#include "megacore/moe/team_memory.h"

namespace megacore::moe {

template <typename Team, typename Warp>
class TeamPlanner {
 public:
  // `counts` is (rank, expert); memory and plan belong to the team.
  MC_TEAM_CODE TeamPlanner(const Team& team,
                           const Warp& warp,
                           const PlanShape& shape,
                           const PlanSpec& spec,
                           const PlanMemory& memory,
                           const int64_t* counts,
                           const RankPlan& plan)
      : team_(team),
        warp_(warp),
        spec_(spec),
        s_(shape),
        domain_size_(spec.domain_size == 0 ? shape.num_ranks : spec.domain_size),
        m_(memory),
        counts_(counts),
        plan_(plan) {}

  MC_TEAM_CODE void run() {
    sum_loads();
    keep_at_home();
    choose();
    split_sources();
    write_loads();
    summarize();
  }

  // Chooses the clones and their tokens, PlanMemory::chosen(), where the loads and the facts of the
  // memory are written already.
  MC_TEAM_CODE void choose() {
    const int64_t total = m_.facts().total;
    const bool is_wanted = m_.facts().is_valid != 0 && m_.facts().highest_load > no_plan_up_to();
    clear_chosen();
    if (is_wanted && s_.num_slots() > 0) {  // the same for every thread
      if (spec_.is_balanced()) {
        race(goal_load(total, s_.num_ranks, spec_.tolerance_per_million));
      } else {
        assign_spillover(total / s_.num_ranks);
      }
    }
    team_.sync();
  }

  // Writes the summary of a plan whose clones are chosen and whose loads are written.
  MC_TEAM_CODE void summarize() const {
    if (team_.warp() != 0) {
      return;
    }
    uint64_t max_load = 0;
    int64_t num_clones = 0;
    int64_t num_moved = 0;
    for (int64_t p = warp_.lane(); p < s_.num_ranks; p += warp_.lanes()) {
      const auto load = static_cast<uint64_t>(plan_.load_after[p]);
      max_load = load > max_load ? load : max_load;
    }
    for (int64_t i = warp_.lane(); i < s_.num_slots(); i += warp_.lanes()) {
      num_clones += m_.chosen().expert[i] >= 0 ? 1 : 0;
      num_moved += m_.chosen().tokens[i];  // 0 where unused
    }
    PlanSummary summary;
    summary.max_load = static_cast<int64_t>(warp_.max(max_load));
    summary.num_clones = warp_.sum(num_clones);
    summary.num_moved = warp_.sum(num_moved);
    const int64_t total = m_.facts().total;
    const int64_t goal = spec_.is_balanced()
                             ? goal_load(total, s_.num_ranks, spec_.tolerance_per_million)
                             : total / s_.num_ranks + total % s_.num_ranks;
    summary.bound = larger(goal, no_plan_up_to());
    summary.is_valid = m_.facts().is_valid;
    summary.bound_holds = summary.is_valid != 0 && summary.max_load <= summary.bound ? 1 : 0;
    if (warp_.lane() == 0) {
      *plan_.summary = summary;
    }
  }

 private:
  static constexpr int64_t kNoLimit = int64_t{1} << 62;

  // Up to this load of a rank there are no clones.
  MC_TEAM_CODE int64_t no_plan_up_to() const {
    return scaled_average(m_.facts().total, s_.num_ranks, spec_.min_imbalance_per_million);
  }

  MC_TEAM_CODE bool is_first() const { return team_.thread() == 0; }

  MC_TEAM_CODE void sum_loads() {
    uint64_t is_bad = 0;
    for (int64_t e = team_.thread(); e < s_.num_experts; e += team_.threads()) {
      int64_t sum = 0;
#if defined(__CUDACC__)
#pragma unroll 8
#endif
      for (int64_t r = 0; r < s_.num_ranks; ++r) {
        const int64_t count = counts_[r * s_.num_experts + e];
        const bool is_good = count >= 0 && count <= kMaxTokensPerExpert - sum;
        is_bad |= is_good ? 0 : 1;
        sum += is_good ? count : 0;
      }
      m_.experts()[e] = sum;
    }
    if (is_first()) {
      m_.facts().is_valid = 1;
    }
    team_.sync();
    if (is_bad != 0) {
      m_.facts().is_valid = 0;  // whoever finds one writes the same
    }
    for (int64_t p = team_.thread(); p < s_.num_ranks; p += team_.threads()) {
      int64_t load = 0;
      for (int64_t i = 0; i < s_.experts_per_rank(); ++i) {
        load += m_.experts()[p * s_.experts_per_rank() + i];
      }
      m_.ranks()[p] = load;
    }
    team_.sync();
    if (team_.warp() == 0) {
      int64_t total = 0;
      uint64_t highest = 0;
      for (int64_t p = warp_.lane(); p < s_.num_ranks; p += warp_.lanes()) {
        total += m_.ranks()[p];
        const auto load = static_cast<uint64_t>(m_.ranks()[p]);
        highest = load > highest ? load : highest;
      }
      uint64_t largest = 0;
      for (int64_t e = warp_.lane(); e < s_.num_experts; e += warp_.lanes()) {
        const auto tokens = static_cast<uint64_t>(m_.experts()[e]);
        largest = tokens > largest ? tokens : largest;
      }
      total = warp_.sum(total);
      highest = warp_.max(highest);
      largest = warp_.max(largest);
      if (warp_.lane() == 0) {
        m_.facts().total = total;
        m_.facts().highest_load = static_cast<int64_t>(highest);
        m_.facts().largest_expert = static_cast<int64_t>(largest);
      }
    }
    team_.sync();
  }

  // Writes the tokens of this rank as they are without clones.
  MC_TEAM_CODE void keep_at_home() const {
    for (int64_t i = team_.thread(); i < s_.num_slots(); i += team_.threads()) {
      plan_.sent[i] = 0;
    }
    const int64_t local = s_.experts_per_rank();
    for (int64_t i = team_.thread(); i < s_.num_ranks * s_.places_per_rank();
         i += team_.threads()) {
      const int64_t source = i / s_.places_per_rank();
      const int64_t place = i % s_.places_per_rank();
      plan_.arriving[i] =
          place < local ? counts_[source * s_.num_experts + plan_.rank * local + place] : 0;
    }
  }

  MC_TEAM_CODE void clear_chosen() const {
    for (int64_t i = team_.thread(); i < s_.num_slots(); i += team_.threads()) {
      m_.chosen().expert[i] = -1;
      m_.chosen().tokens[i] = 0;
    }
    team_.sync();
  }

  // ---- balanced

  // Every thread keeps the same best score and the same iterations.
  MC_TEAM_CODE void race(int64_t goal) {
    Score best;
    bool has_best = false;
    int64_t missed = goal;
    int64_t reached = goal;
    int64_t num_goals = 1;
    for (int round = 0;; ++round) {
      enter(goal, num_goals, missed, reached, best, has_best);
      if (round == kRefinementRounds || best.max_load <= goal) {
        return;
      }
      if (round > 0) {
        missed = highest_missed(missed, reached, best.max_load);
      }
      reached = best.max_load;
      num_goals = 0;
      int64_t previous = missed;
      for (int64_t index = 0; index < kGoalsPerRound; ++index) {
        const int64_t next = refined_goal(missed, reached, index);
        num_goals += next > previous ? 1 : 0;
        previous = larger(previous, next);
      }
    }
  }

  // The highest goal of a round that is still below the best load.
  MC_TEAM_CODE static int64_t highest_missed(int64_t missed, int64_t reached, int64_t best_load) {
    int64_t highest = missed;
    for (int64_t index = 0; index < kGoalsPerRound; ++index) {
      const int64_t goal = refined_goal(missed, reached, index);
      highest = goal < best_load ? larger(highest, goal) : highest;
    }
    return highest;
  }

  // The `number`-th of the goals of a round that differ from earlier ones; `missed` itself if there
  // is nothing to refine.
  MC_TEAM_CODE int64_t goal_of_round(int64_t number, int64_t missed, int64_t reached) const {
    if (missed == reached) {
      return missed;
    }
    int64_t previous = missed;
    int64_t found = -1;
    for (int64_t index = 0; index < kGoalsPerRound; ++index) {
      const int64_t next = refined_goal(missed, reached, index);
      if (next > previous) {
        previous = next;
        if (++found == number) {
          break;
        }
      }
    }
    return previous;
  }

  // All rules for all goals of a round, as many runs at a time as there is memory for. Keeps the
  // best result, the earlier of equals.
  MC_TEAM_CODE void enter(int64_t least_load,
                          int64_t num_goals,
                          int64_t missed,
                          int64_t reached,
                          Score& best,
                          bool& has_best) {
    const int64_t num_runs = num_goals * kNumRules;
    for (int64_t first = 0; first < num_runs; first += m_.num_runs()) {
      const int64_t count = smaller(m_.num_runs(), num_runs - first);
      for (int64_t i = team_.warp(); i < count; i += team_.warps()) {
        const int64_t number = first + i;
        const RunMemory memory = m_.run(i);
        GreedyRun<Warp> run(warp_, memory, s_);
        const bool is_done = run.run(static_cast<Rule>(number % kNumRules),
                                     goal_of_round(number / kNumRules, missed, reached),
                                     has_best ? best.load : kNoLimit, domain_size_,
                                     {m_.ranks(), m_.experts(), m_.facts().largest_expert});
        const Score score = is_done ? run.score(least_load, domain_size_) : Score{.load = kNoLimit};
        if (warp_.lane() == 0) {
          *memory.score = score;
        }
      }
      team_.sync();
      int64_t winner = -1;
      for (int64_t i = 0; i < count; ++i) {
        const Score score = *m_.run(i).score;
        if (!has_best || better(score, best)) {
          best = score;
          has_best = true;
          winner = i;
        }
      }
      if (winner >= 0) {
        const SlotTable clones = m_.run(winner).clones;
        for (int64_t i = team_.thread(); i < s_.num_slots(); i += team_.threads()) {
          m_.chosen().expert[i] = clones.expert[i];
          m_.chosen().tokens[i] = clones.tokens[i];
        }
      }
      team_.sync();  // before the next runs overwrite these
    }
  }

  // ---- echo

  // Whether `a` at index i precedes `b` at index j in a stable descending order.
  MC_TEAM_CODE static bool stands_before(int64_t a, int64_t i, int64_t b, int64_t j) {
    return a > b || (a == b && i < j);
  }

  MC_TEAM_CODE void assign_spillover(int64_t average) {
    const int64_t per_rank = s_.experts_per_rank();
    for (int64_t e = team_.thread(); e < s_.num_experts; e += team_.threads()) {
      m_.spilled()[e] = m_.ranks()[e / per_rank] > average ? spilled(e, average) : 0;
    }
    for (int64_t p = team_.thread(); p < s_.num_ranks; p += team_.threads()) {
      m_.room_start()[p] = room_start(p, average);
    }
    team_.sync();
    list_spilling();
    team_.sync();
    for (int64_t i = team_.thread(); i < num_spilling(); i += team_.threads()) {
      m_.spilling_start()[i] = spilling_start(i);
    }
    team_.sync();
    for (int64_t p = team_.warp(); p < s_.num_ranks; p += team_.warps()) {
      if (m_.ranks()[p] < average) {
        take_pieces(p, average - m_.ranks()[p]);
      }
    }
  }

  // Tokens above the average when the experts of the rank of `expert` are summed in ascending
  // order.
  MC_TEAM_CODE int64_t spilled(int64_t expert, int64_t average) const {
    const int64_t per_rank = s_.experts_per_rank();
    const int64_t first = expert / per_rank * per_rank;
    const int64_t mine = m_.experts()[expert];
    int64_t below = 0;
    for (int64_t f = first; f < first + per_rank; ++f) {
      const int64_t other = m_.experts()[f];
      below += other < mine || (other == mine && f < expert) ? other : 0;
    }
    return larger(0, below + mine - average) - larger(0, below - average);
  }

  MC_TEAM_CODE int64_t room_start(int64_t rank, int64_t average) const {
    const int64_t mine = larger(0, average - m_.ranks()[rank]);
    int64_t start = 0;
    for (int64_t q = 0; q < s_.num_ranks; ++q) {
      const int64_t other = larger(0, average - m_.ranks()[q]);
      start += stands_before(other, q, mine, rank) ? other : 0;
    }
    return start;
  }

  // The experts that spill, in ascending order: few of all.
  MC_TEAM_CODE void list_spilling() const {
    if (team_.warp() != 0) {
      return;
    }
    int64_t count = 0;
    for (int64_t first = 0; first < s_.num_experts; first += warp_.lanes()) {
      const int64_t e = first + warp_.lane();
      const bool spills = e < s_.num_experts && m_.spilled()[e] > 0;
      int64_t found = 0;
      const int64_t at = count + warp_.before(spills, found);
      if (spills) {
        m_.spilling()[at] = e;
      }
      count += found;
    }
    if (warp_.lane() == 0) {
      m_.facts().num_spilling = count;
    }
  }
  MC_TEAM_CODE int64_t num_spilling() const { return m_.facts().num_spilling; }

  MC_TEAM_CODE int64_t spilling_start(int64_t index) const {
    const int64_t mine = m_.spilled()[m_.spilling()[index]];
    int64_t start = 0;
    for (int64_t i = 0; i < num_spilling(); ++i) {
      const int64_t other = m_.spilled()[m_.spilling()[i]];
      start += stands_before(other, i, mine, index) ? other : 0;
    }
    return start;
  }

  // The largest pieces of a rank, one per slot; of equal ones the lowest expert first.
  MC_TEAM_CODE void take_pieces(int64_t rank, int64_t room) const {
    const Interval bucket{m_.room_start()[rank], m_.room_start()[rank] + room};
    uint64_t last = ~uint64_t{0};
    for (int64_t slot = 0; slot < s_.num_spare_slots; ++slot) {
      uint64_t best = 0;
      for (int64_t i = warp_.lane(); i < num_spilling(); i += warp_.lanes()) {
        const int64_t expert = m_.spilling()[i];
        const int64_t start = m_.spilling_start()[i];
        const int64_t tokens = overlap({start, start + m_.spilled()[expert]}, bucket);
        const uint64_t key = tokens > 0 ? most_key(tokens, expert) : 0;
        best = key < last && key > best ? key : best;
      }
      last = warp_.max(best);
      if (last == 0) {
        return;
      }
      if (warp_.lane() == 0) {
        m_.chosen().expert[rank * s_.num_spare_slots + slot] = index_of_most(last);
        m_.chosen().tokens[rank * s_.num_spare_slots + slot] =
            static_cast<int64_t>(last >> kIndexBits);
      }
    }
  }

  // ---- sources

  MC_TEAM_CODE void split_sources() const {
    const int64_t num_warps = smaller(team_.warps(), m_.num_runs());  // as many have memory for it
    if (team_.warp() < num_warps) {
      for (int64_t slot = team_.warp(); slot < s_.num_slots(); slot += num_warps) {
        if (m_.chosen().expert[slot] >= 0) {
          split_expert(slot, m_.split(team_.warp()));
        }
      }
    }
  }

  // The expert in a slot, if no earlier slot has it as well.
  MC_TEAM_CODE void split_expert(int64_t first_slot, const SplitMemory& m) const {
    const SlotTable chosen = m_.chosen();
    const int64_t expert = chosen.expert[first_slot];
    uint64_t has_earlier = 0;
    for (int64_t i = warp_.lane(); i < first_slot; i += warp_.lanes()) {
      has_earlier |= chosen.expert[i] == expert ? 1 : 0;
    }
    if (warp_.max(has_earlier) != 0) {
      return;
    }
    int64_t num_clones = 0;
    int64_t moved = 0;
    for (int64_t first = first_slot; first < s_.num_slots(); first += warp_.lanes()) {
      const int64_t slot = first + warp_.lane();
      const bool is_clone = slot < s_.num_slots() && chosen.expert[slot] == expert;
      int64_t found = 0;
      const int64_t at = num_clones + warp_.before(is_clone, found);
      if (is_clone) {
        m.slot[at] = slot;
        moved += chosen.tokens[slot];
      }
      num_clones += found;
    }
    const int64_t stays_home = m_.experts()[expert] - warp_.sum(moved);
    for (int64_t r = warp_.lane(); r < s_.num_ranks; r += warp_.lanes()) {
      m.left[r] = counts_[r * s_.num_experts + expert];
    }
    warp_.sync();
    for (int64_t j = warp_.lane(); j < num_clones; j += warp_.lanes()) {
      const int64_t rank = m.slot[j] / s_.num_spare_slots;  // another one for every clone
      const int64_t tokens = chosen.tokens[m.slot[j]];
      m.own[j] = spec_.is_balanced() ? smaller(m.left[rank], tokens) : 0;
      m.missing[j] = tokens - m.own[j];
      m.left[rank] -= m.own[j];
    }
    warp_.sync();
    const int64_t home = s_.home(expert);
    if (spec_.is_balanced() && warp_.lane() == 0) {
      m.left[home] -= smaller(m.left[home], stays_home);
    }
    warp_.sync();
    share(m, expert, num_clones);
  }

  // Whether this rank needs to know the tokens of a source for a clone.
  MC_TEAM_CODE bool is_concerned(int64_t source, int64_t expert, int64_t slot) const {
    return source == plan_.rank || s_.home(expert) == plan_.rank ||
           slot / s_.num_spare_slots == plan_.rank;
  }

  // Moves tokens of a source from the home expert to a clone. One lane calls it for each source.
  MC_TEAM_CODE void move(int64_t source, int64_t expert, int64_t slot, int64_t tokens) const {
    int64_t* row = plan_.arriving + source * s_.places_per_rank();
    if (source == plan_.rank) {
      plan_.sent[slot] = tokens;
    }
    if (s_.home(expert) == plan_.rank) {
      row[expert % s_.experts_per_rank()] -= tokens;
    }
    if (slot / s_.num_spare_slots == plan_.rank) {
      row[s_.experts_per_rank() + slot % s_.num_spare_slots] = tokens;
    }
  }

  // Proportional shares rounded down, then the remainder in the order of the sources.
  MC_TEAM_CODE void share(const SplitMemory& m, int64_t expert, int64_t num_clones) const {
    int64_t total = 0;
    for (int64_t r = warp_.lane(); r < s_.num_ranks; r += warp_.lanes()) {
      total += m.left[r];
      m.left_over[r] = m.left[r];
    }
    total = warp_.sum(total);
    for (int64_t j = 0; j < num_clones; ++j) {
      int64_t given = 0;
      for (int64_t r = warp_.lane(); r < s_.num_ranks; r += warp_.lanes()) {
        const int64_t part = proportional_floor(m.left[r], m.missing[j], total);
        m.left_over[r] -= part;
        given += part;
      }
      given = warp_.sum(given);
      if (warp_.lane() == 0) {
        m.missing_after[j] = m.missing[j] - given;
      }
    }
    warp_.sync();
    int64_t start = 0;
    for (int64_t first = 0; first < s_.num_ranks; first += warp_.lanes()) {
      const int64_t r = first + warp_.lane();
      const int64_t left_over = r < s_.num_ranks ? m.left_over[r] : 0;
      int64_t sum = 0;
      Interval source;
      source.start = start + warp_.sum_before(left_over, sum);
      source.end = source.start + left_over;
      start += sum;
      if (r >= s_.num_ranks) {
        continue;
      }
      Interval wanted;
      for (int64_t j = 0; j < num_clones; ++j) {
        wanted = {wanted.end, wanted.end + m.missing_after[j]};
        if (is_concerned(r, expert, m.slot[j])) {
          const int64_t own = m.slot[j] / s_.num_spare_slots == r ? m.own[j] : 0;
          const int64_t part = proportional_floor(m.left[r], m.missing[j], total);
          move(r, expert, m.slot[j], part + own + overlap(source, wanted));
        }
      }
    }
    warp_.sync();  // before the next expert of this warp
  }

  // ---- results

  MC_TEAM_CODE void write_loads() const {
    const SlotTable chosen = m_.chosen();
    for (int64_t i = team_.thread(); i < s_.num_slots(); i += team_.threads()) {
      plan_.slot_expert[i] = chosen.expert[i];
    }
    for (int64_t p = team_.warp(); p < s_.num_ranks; p += team_.warps()) {
      int64_t gained = 0;
      const int64_t first_expert = p * s_.experts_per_rank();
      for (int64_t i = warp_.lane(); i < s_.num_slots(); i += warp_.lanes()) {
        const int64_t expert = chosen.expert[i];
        const bool is_home =
            expert >= first_expert && expert < first_expert + s_.experts_per_rank();
        gained -= is_home ? chosen.tokens[i] : 0;
      }
      for (int64_t i = warp_.lane(); i < s_.num_spare_slots; i += warp_.lanes()) {
        gained += chosen.tokens[p * s_.num_spare_slots + i];  // 0 where unused
      }
      gained = warp_.sum(gained);
      if (warp_.lane() == 0) {
        plan_.load_before[p] = m_.ranks()[p];
        plan_.load_after[p] = m_.ranks()[p] + gained;
      }
    }
    team_.sync();
  }

  Team team_;
  Warp warp_;
  PlanSpec spec_;
  PlanShape s_;
  int64_t domain_size_;
  PlanMemory m_;
  const int64_t* counts_;
  RankPlan plan_;
};

}  // namespace megacore::moe
