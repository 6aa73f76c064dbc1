#include "megacore/moe/offload_plan.h"

#include <algorithm>
#include <vector>

#include "megacore/base/check.h"
#include "megacore/base/vector_clones.h"
#include "megacore/moe/team_planner.h"

namespace megacore::moe {
namespace {

struct PlannerCall {
  PlanShape shape = {};
  PlanSpec spec = {};
  int64_t* memory = nullptr;
  const int64_t* counts = nullptr;
  TeamPlan plan = {};
};

// Everything is inlined here, because only then are its loops compiled once per vector width.
MC_VECTOR_CLONES_V4 __attribute__((flatten)) void plan_by_one_thread(const PlannerCall& call) {
  const SoloTeam solo;
  TeamPlanner<SoloTeam, SoloTeam>(solo, solo, call.shape, call.spec,
                                  PlanMemory(call.memory, call.shape, 1), call.counts, call.plan)
      .plan();
}

}  // namespace

OffloadPlan plan_offload(const TokenCounts& counts, const PlanSpec& spec) {
  const Loads loads = sum_loads(counts);
  require_spec(spec, counts.num_ranks);
  const PlanShape shape{counts.num_ranks, counts.num_experts, spec.num_spare_slots};
  std::vector<int64_t> words(static_cast<size_t>(PlanMemory::words(shape, 1)));
  const PlanMemory memory(words.data(), shape, 1);
  std::copy(loads.experts.begin(), loads.experts.end(), memory.experts());
  std::copy(loads.ranks.begin(), loads.ranks.end(), memory.ranks());
  memory.facts() = {
      .total = loads.total,
      .highest_load = loads.highest(),
      .largest_expert = *std::max_element(loads.experts.begin(), loads.experts.end())};
  const auto ranks = static_cast<size_t>(shape.num_ranks);
  const auto slots = static_cast<size_t>(shape.num_slots());
  OffloadPlan plan{.num_ranks = shape.num_ranks,
                   .num_experts = shape.num_experts,
                   .num_spare_slots = shape.num_spare_slots,
                   .slot_expert = std::vector<int64_t>(slots),
                   .rerouted = std::vector<int64_t>(ranks * slots),
                   .load_before = std::vector<int64_t>(ranks),
                   .load_after = std::vector<int64_t>(ranks)};
  TeamPlanSummary summary;
  plan_by_one_thread({.shape = shape,
                      .spec = spec,
                      .memory = words.data(),
                      .counts = counts.tokens,
                      .plan = {.slot_expert = plan.slot_expert.data(),
                               .rerouted = plan.rerouted.data(),
                               .load_before = plan.load_before.data(),
                               .load_after = plan.load_after.data(),
                               .summary = &summary}});
  plan.max_load = summary.max_load;
  plan.num_clones = summary.num_clones;
  plan.bound = summary.bound;
  plan.bound_holds = summary.bound_holds != 0;
  MC_INVARIANT(
      plan.bound_holds || !spec.is_balanced() || spec.num_spare_slots < shape.experts_per_rank(),
      "the plan leaves a rank with {} tokens, above the guaranteed {}", plan.max_load, plan.bound);
  return plan;
}

}  // namespace megacore::moe
