// Size and options of an offload plan, for the planner on the CPU (offload_plan.h) and on a GPU.

#pragma once

#include <cstdint>
#include <string_view>

#include "megacore/base/check.h"
#include "megacore/base/host_device.h"
#include "megacore/moe/planner_math.h"

namespace megacore::moe {

inline constexpr int64_t kMaxSpareSlots = 1024;
inline constexpr int64_t kMostImbalancePerMillion = 1000 * kMillion;

struct PlanShape {
  int64_t num_ranks = 1;
  int64_t num_experts = 1;
  int64_t num_spare_slots = 0;  // of a rank

  MC_HOST_DEVICE int64_t experts_per_rank() const { return num_experts / num_ranks; }
  MC_HOST_DEVICE int64_t num_slots() const { return num_ranks * num_spare_slots; }
  MC_HOST_DEVICE int64_t places_per_rank() const { return experts_per_rank() + num_spare_slots; }
  MC_HOST_DEVICE int64_t home(int64_t expert) const { return expert / experts_per_rank(); }

  // Places are those of rank 0, home experts before slots, then those of rank 1, and so on.
  MC_HOST_DEVICE int64_t place_of_expert(int64_t expert) const {
    return home(expert) * places_per_rank() + expert % experts_per_rank();
  }
  // `slot` counts the slots of all ranks.
  MC_HOST_DEVICE int64_t place_of_slot(int64_t slot) const {
    return slot / num_spare_slots * places_per_rank() + experts_per_rank() + slot % num_spare_slots;
  }
};

enum class PlanMethod {
  kEcho,  // see team_planner.h
  kBalanced,
};

// "echo" and "balanced". Throws std::invalid_argument for any other name.
inline PlanMethod plan_method(std::string_view name) {
  if (name == "echo") {
    return PlanMethod::kEcho;
  }
  MC_REQUIRE(name == "balanced",
             "no offload planner is called \"{}\"; there are \"balanced\" and \"echo\"", name);
  return PlanMethod::kBalanced;
}

struct PlanSpec {
  PlanMethod method = PlanMethod::kBalanced;
  int64_t num_spare_slots = 1;
  // Balanced only: room above the average that is not worth a clone, in millionths of the average.
  int64_t tolerance_per_million = 10'000;
  // No clones while the highest load is at most this many millionths of the average.
  int64_t min_imbalance_per_million = kMillion;
  // Balanced only. Ranks [0, n), [n, 2n) ... have the fastest links; clones stay inside such a
  // domain if the goal can be reached that way, and leave it only for the rest. 0: all ranks are
  // alike.
  int64_t domain_size = 0;

  MC_HOST_DEVICE bool is_balanced() const { return method == PlanMethod::kBalanced; }
};

// Numbers of a plan; see OffloadPlan.
struct PlanSummary {
  int64_t max_load = 0;
  int64_t num_clones = 0;
  int64_t bound = 0;
  int64_t bound_holds = 1;
  int64_t is_valid = 1;   // 0: a count is negative or too large, and the plan has no clones
  int64_t num_moved = 0;  // tokens of all clones

  friend bool operator==(const PlanSummary&, const PlanSummary&) = default;
};
inline constexpr int64_t kPlanNumbers = sizeof(PlanSummary) / sizeof(int64_t);

// Memory for what one rank needs of a plan: O(ranks), where all of it is O(ranks^2).
struct RankPlan {
  int64_t rank = 0;
  int64_t* slot_expert = nullptr;  // (rank, slot), as load_before and load_after of an OffloadPlan
  int64_t* sent = nullptr;         // (rank, slot): `rerouted` of this rank
  // (source rank, place of this rank): tokens for its home experts, and for its slots.
  int64_t* arriving = nullptr;
  int64_t* load_before = nullptr;
  int64_t* load_after = nullptr;
  PlanSummary* summary = nullptr;
};

// Throws std::invalid_argument for slots outside [0, 1024], a tolerance outside [0, 10^6], a
// minimum imbalance outside [10^6, 10^9], a domain size that does not divide the number of ranks,
// or a domain with the echo method.
inline void require_spec(const PlanSpec& spec, int64_t num_ranks) {
  MC_REQUIRE(spec.num_spare_slots >= 0 && spec.num_spare_slots <= kMaxSpareSlots,
             "num_spare_slots must be in [0, {}], got {}", kMaxSpareSlots, spec.num_spare_slots);
  MC_REQUIRE(spec.tolerance_per_million >= 0 && spec.tolerance_per_million <= kMillion,
             "the tolerance is {} millionths of the average; it must be in [0, 1000000]",
             spec.tolerance_per_million);
  MC_REQUIRE(
      spec.min_imbalance_per_million >= kMillion &&
          spec.min_imbalance_per_million <= kMostImbalancePerMillion,
      "the minimum imbalance is {} millionths of the average; it must be in [1000000, 1000000000]",
      spec.min_imbalance_per_million);
  MC_REQUIRE(spec.domain_size >= 0 && (spec.domain_size == 0 || num_ranks % spec.domain_size == 0),
             "domain_size is {}; it must divide the number of ranks, {}", spec.domain_size,
             num_ranks);
  MC_REQUIRE(spec.domain_size == 0 || spec.is_balanced(),
             "domain_size is {}, but only the balanced planner knows domains", spec.domain_size);
}

}  // namespace megacore::moe
