// Plan of clones: hot experts in spare slots, and their tokens.
//
// Every rank computes the same plan from the same counts: integers only, ties go to the lowest
// index.
// A plan moves tokens from home experts and conserves their number:
//
//   tokens of e that source r keeps at home = counts[r, e] - sum over slots (p, s) that hold e
//                                                            of rerouted[r, p, s]

#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "megacore/moe/token_counts.h"

namespace megacore::moe {

enum class PlanMethod {
  kDocumented,  // documented.h
  kBalanced,    // balanced.h
};

// "echo" and "balanced". Throws std::invalid_argument for any other name.
PlanMethod plan_method(std::string_view name);

inline constexpr int64_t kMaxSpareSlots = 1024;

struct PlanSpec {
  PlanMethod method = PlanMethod::kBalanced;
  int64_t num_spare_slots = 1;
  // Balanced only: room above the average that is not worth a clone, in millionths of the average.
  int64_t tolerance_per_million = 10'000;
  // No clones while the highest load is at most this many millionths of the average.
  int64_t min_imbalance_per_million = kMillion;
  // Balanced only: see BalancedSpec. 0 means all ranks.
  int64_t domain_size = 0;
};

struct OffloadPlan {
  int64_t num_ranks = 0;
  int64_t num_experts = 0;
  int64_t num_spare_slots = 0;
  std::vector<int64_t> slot_expert = {};  // (rank, slot): cloned expert, -1 where unused
  std::vector<int64_t> rerouted = {};     // (source rank, destination rank, slot): tokens
  std::vector<int64_t> load_before = {};  // (rank,)
  std::vector<int64_t> load_after = {};   // (rank,)
  int64_t max_load = 0;                   // highest of load_after
  int64_t num_clones = 0;
  // Rows of a static receive buffer that are sufficient for this total. Balanced: the goal load, or
  // the load below which there is no plan if that is larger; documented: the floor average plus the
  // remainder.
  int64_t bound = 0;
  bool bound_holds = true;  // max_load <= bound; always, if balanced and slots >= experts per rank

  friend bool operator==(const OffloadPlan&, const OffloadPlan&) = default;
};

// Throws std::invalid_argument for bad counts (see sum_loads), slots outside [0, 1024], a
// tolerance outside [0, 10^6], a minimum imbalance outside [10^6, 10^9], a domain size that does
// not divide the number of ranks, or a domain with the documented method.
OffloadPlan plan_offload(const TokenCounts& counts, const PlanSpec& spec);

}  // namespace megacore::moe
