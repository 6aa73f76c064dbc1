#include "megacore/moe/offload_plan.h"

#include <algorithm>
#include <string>
#include <utility>

#include "megacore/base/check.h"
#include "megacore/moe/balanced.h"
#include "megacore/moe/documented.h"
#include "megacore/moe/source_split.h"

namespace megacore::moe {
namespace {

constexpr int64_t kMostImbalancePerMillion = 1000 * kMillion;

void require_spec(const PlanSpec& spec, const TokenCounts& counts) {
  MC_REQUIRE(spec.num_spare_slots >= 0 && spec.num_spare_slots <= kMaxSpareSlots,
             "num_spare_slots is ",
             spec.num_spare_slots,
             "; it must be in [0, ",
             kMaxSpareSlots,
             "]");
  MC_REQUIRE(spec.tolerance_per_million >= 0 && spec.tolerance_per_million <= kMillion,
             "the tolerance is ",
             spec.tolerance_per_million,
             " millionths of the average; it must be in [0, 1000000]");
  MC_REQUIRE(spec.min_imbalance_per_million >= kMillion &&
                 spec.min_imbalance_per_million <= kMostImbalancePerMillion,
             "the minimum imbalance is ",
             spec.min_imbalance_per_million,
             " millionths of the average; it must be in [1000000, 1000000000]");
  MC_REQUIRE(
      spec.domain_size >= 0 && (spec.domain_size == 0 || counts.num_ranks % spec.domain_size == 0),
      "domain_size is ",
      spec.domain_size,
      "; it must divide the number of ranks, ",
      counts.num_ranks);
  MC_REQUIRE(spec.domain_size == 0 || spec.method == PlanMethod::kBalanced,
             "domain_size is ",
             spec.domain_size,
             ", but only the balanced planner knows domains");
}

// The highest load that a plan of this total is meant to leave; see OffloadPlan::bound.
int64_t load_bound(const Loads& loads, const PlanSpec& spec) {
  const auto num_ranks = static_cast<int64_t>(loads.ranks.size());
  if (spec.method == PlanMethod::kDocumented) {
    return larger(loads.total / num_ranks + loads.total % num_ranks,
                  scaled_average(loads.total, num_ranks, spec.min_imbalance_per_million));
  }
  return larger(goal_load(loads.total, num_ranks, spec.tolerance_per_million),
                scaled_average(loads.total, num_ranks, spec.min_imbalance_per_million));
}

std::vector<Clone> choose_clones(const Loads& loads, const PlanSpec& spec) {
  const auto num_ranks = static_cast<int64_t>(loads.ranks.size());
  if (loads.highest() <= scaled_average(loads.total, num_ranks, spec.min_imbalance_per_million)) {
    return {};
  }
  if (spec.method == PlanMethod::kDocumented) {
    return plan_documented(loads, spec.num_spare_slots);
  }
  return plan_balanced(loads,
                       {.num_spare_slots = spec.num_spare_slots,
                        .tolerance_per_million = spec.tolerance_per_million,
                        .domain_size = spec.domain_size == 0 ? num_ranks : spec.domain_size})
      .clones;
}

}  // namespace

PlanMethod plan_method(std::string_view name) {
  if (name == "echo") {
    return PlanMethod::kDocumented;
  }
  MC_REQUIRE(name == "balanced",
             "no offload planner is called \"",
             name,
             "\"; there are \"balanced\" and \"echo\"");
  return PlanMethod::kBalanced;
}

OffloadPlan plan_offload(const TokenCounts& counts, const PlanSpec& spec) {
  const Loads loads = sum_loads(counts);
  require_spec(spec, counts);
  const std::vector<Clone> clones = choose_clones(loads, spec);
  OffloadPlan plan{.num_ranks = counts.num_ranks,
                   .num_experts = counts.num_experts,
                   .num_spare_slots = spec.num_spare_slots,
                   .load_before = loads.ranks,
                   .load_after = loads.ranks,
                   .num_clones = static_cast<int64_t>(clones.size()),
                   .bound = load_bound(loads, spec)};
  plan.slot_expert.assign(static_cast<size_t>(counts.num_ranks * spec.num_spare_slots), -1);
  for (const Clone& clone : clones) {
    plan.slot_expert[static_cast<size_t>(clone.rank * spec.num_spare_slots + clone.slot)] =
        clone.expert;
    plan.load_after[static_cast<size_t>(counts.home(clone.expert))] -= clone.tokens;
    plan.load_after[static_cast<size_t>(clone.rank)] += clone.tokens;
  }
  plan.rerouted =
      split_sources(counts, clones, spec.num_spare_slots, spec.method == PlanMethod::kBalanced);
  plan.max_load = *std::max_element(plan.load_after.begin(), plan.load_after.end());
  plan.bound_holds = plan.max_load <= plan.bound;
  MC_INVARIANT(plan.bound_holds || spec.method != PlanMethod::kBalanced ||
                   spec.num_spare_slots < counts.experts_per_rank(),
               "the plan leaves a rank with ",
               plan.max_load,
               " tokens, above the guaranteed ",
               plan.bound);
  return plan;
}

}  // namespace megacore::moe
