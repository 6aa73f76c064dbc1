// Checks a plan against its counts from scratch, sharing no code with the planner.

#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "megacore/moe/offload_plan.h"

namespace megacore::moe::testing {

// Counts with their own memory.
struct Routing {
  int64_t num_ranks = 1;
  int64_t num_experts = 1;
  std::vector<int64_t> tokens = {};  // (ranks, experts)

  TokenCounts counts() const { return {tokens.data(), num_ranks, num_experts}; }
  int64_t at(int64_t rank, int64_t expert) const {
    return tokens[static_cast<size_t>(rank * num_experts + expert)];
  }
  std::string to_text() const {
    std::string text = std::to_string(num_ranks) + " x " + std::to_string(num_experts) + ":";
    for (const int64_t count : tokens) {
      text += ' ';
      text += std::to_string(count);
    }
    return text;
  }
};

// What is wrong with `plan`; empty where nothing is.
class PlanChecker {
 public:
  PlanChecker(const Routing& routing, const PlanSpec& spec, const OffloadPlan& plan)
      : routing_(routing),
        spec_(spec),
        plan_(plan),
        num_ranks_(routing.num_ranks),
        slots_(spec.num_spare_slots),
        experts_per_rank_(routing.num_experts / routing.num_ranks) {}

  std::string first_violation() {
    check_slots();
    check_tokens();
    check_loads();
    check_bound();
    return violation_;
  }

 private:
  void expect(bool holds, const std::string& rule) {
    if (!holds && violation_.empty()) {
      violation_ = rule;
    }
  }
  int64_t expert_in(int64_t rank, int64_t slot) const {
    return plan_.slot_expert[static_cast<size_t>(rank * slots_ + slot)];
  }
  int64_t moved(int64_t source, int64_t rank, int64_t slot) const {
    return plan_.rerouted[static_cast<size_t>((source * num_ranks_ + rank) * slots_ + slot)];
  }

  void check_slots() {
    expect(plan_.slot_expert.size() == static_cast<size_t>(num_ranks_ * slots_), "slot table size");
    expect(plan_.rerouted.size() == static_cast<size_t>(num_ranks_ * num_ranks_ * slots_),
           "rerouted size");
    int64_t num_clones = 0;
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      std::set<int64_t> held;
      for (int64_t slot = 0; slot < slots_; ++slot) {
        const int64_t expert = expert_in(rank, slot);
        expect(expert >= -1 && expert < routing_.num_experts, "slots hold experts or -1");
        if (expert >= 0) {
          ++num_clones;
          expect(held.insert(expert).second, "no rank holds two clones of one expert");
          expect(expert / experts_per_rank_ != rank, "no rank clones an expert of its own");
        }
      }
    }
    expect(num_clones == plan_.num_clones, "num_clones counts the used slots");
  }

  void check_tokens() {
    std::vector<int64_t> left = routing_.tokens;
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      for (int64_t slot = 0; slot < slots_; ++slot) {
        const int64_t expert = expert_in(rank, slot);
        int64_t served = 0;
        for (int64_t source = 0; source < num_ranks_; ++source) {
          const int64_t tokens = moved(source, rank, slot);
          expect(tokens >= 0, "rerouted tokens are not negative");
          expect(expert >= 0 || tokens == 0, "nothing goes to an unused slot");
          served += tokens;
          if (expert >= 0) {
            left[static_cast<size_t>(source * routing_.num_experts + expert)] -= tokens;
          }
        }
        expect(expert < 0 || served > 0, "no clone is idle");
        if (expert >= 0 && spec_.method == PlanMethod::kBalanced) {
          expect(moved(rank, rank, slot) == std::min(served, routing_.at(rank, expert)),
                 "a clone serves the tokens of its own rank first");
        }
      }
    }
    expect(std::all_of(left.begin(), left.end(), [](int64_t tokens) { return tokens >= 0; }),
           "no source sends more tokens than it has");
  }

  void check_loads() {
    std::vector<int64_t> before(static_cast<size_t>(num_ranks_), 0);
    for (int64_t source = 0; source < num_ranks_; ++source) {
      for (int64_t expert = 0; expert < routing_.num_experts; ++expert) {
        before[static_cast<size_t>(expert / experts_per_rank_)] += routing_.at(source, expert);
      }
    }
    std::vector<int64_t> after = before;
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      for (int64_t slot = 0; slot < slots_; ++slot) {
        for (int64_t source = 0; source < num_ranks_; ++source) {
          const int64_t tokens = moved(source, rank, slot);
          if (tokens > 0) {
            after[static_cast<size_t>(rank)] += tokens;
            after[static_cast<size_t>(expert_in(rank, slot) / experts_per_rank_)] -= tokens;
          }
        }
      }
    }
    expect(plan_.load_before == before, "load_before");
    expect(plan_.load_after == after, "load_after");
    const int64_t highest_before = *std::max_element(before.begin(), before.end());
    expect(plan_.max_load == *std::max_element(after.begin(), after.end()), "max_load");
    expect(plan_.max_load <= highest_before, "a plan never raises the highest load");
  }

  void check_bound() {
    __extension__ using Wide = __int128;
    Wide total = 0;
    for (const int64_t count : routing_.tokens) {
      total += count;
    }
    const Wide million = 1'000'000;
    const Wide average = total / num_ranks_;
    const Wide remainder = total % num_ranks_;
    Wide bound = average + remainder;
    if (spec_.method == PlanMethod::kBalanced) {
      const Wide tolerated =
          total * (million + spec_.tolerance_per_million) / (million * num_ranks_);
      bound = std::max(average + (remainder > 0 ? 1 : 0), tolerated);
    }
    bound = std::max(bound, Wide{total * spec_.min_imbalance_per_million / (million * num_ranks_)});
    expect(plan_.bound == static_cast<int64_t>(bound), "bound");
    expect(plan_.bound_holds == (plan_.max_load <= plan_.bound), "bound_holds");
    expect(spec_.method != PlanMethod::kBalanced || slots_ < experts_per_rank_ || plan_.bound_holds,
           "the bound holds with as many slots as experts per rank");
  }

  const Routing& routing_;
  const PlanSpec& spec_;
  const OffloadPlan& plan_;
  int64_t num_ranks_;
  int64_t slots_;
  int64_t experts_per_rank_;
  std::string violation_;
};

// Integers in [low, high] without std::uniform_int_distribution, whose results differ by library.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
  }
  bool one_in(int64_t n) { return between(1, n) == 1; }

 private:
  std::mt19937_64 engine_;
};

}  // namespace megacore::moe::testing
