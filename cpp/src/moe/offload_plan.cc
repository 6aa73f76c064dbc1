#include "megacore/moe/offload_plan.h"

#include <algorithm>
#include <vector>

#include "megacore/base/check.h"
#include "megacore/base/vector_clones.h"
#include "megacore/moe/team_planner.h"
#include "split_sources.h"

namespace megacore::moe {
namespace {

struct PlannerCall {
  PlanShape shape = {};
  PlanSpec spec = {};
  PlanMemory memory;
  const int64_t* counts = nullptr;
  TeamPlan plan = {};
};

TeamPlanner<SoloTeam, SoloTeam> planner_of(const PlannerCall& call) {
  const SoloTeam solo;
  return {solo, solo, call.shape, call.spec, call.memory, call.counts, call.plan};
}

// Everything is inlined here, because only then are its loops compiled once per vector width.
MC_VECTOR_CLONES_V4 __attribute__((flatten)) void choose_by_one_thread(const PlannerCall& call) {
  planner_of(call).choose();
}

void write_loads(const PlanShape& shape, const PlanMemory& memory, const TeamPlan& plan) {
  const SlotTable chosen = memory.chosen();
  std::copy_n(chosen.expert, shape.num_slots(), plan.slot_expert);
  std::copy_n(memory.ranks(), shape.num_ranks, plan.load_before);
  std::copy_n(memory.ranks(), shape.num_ranks, plan.load_after);
  for (int64_t slot = 0; slot < shape.num_slots(); ++slot) {
    if (chosen.expert[slot] >= 0) {
      plan.load_after[shape.home(chosen.expert[slot])] -= chosen.tokens[slot];
      plan.load_after[slot / shape.num_spare_slots] += chosen.tokens[slot];
    }
  }
}

}  // namespace

OffloadPlanSummary plan_offload_to(const TokenCounts& counts,
                                   const PlanSpec& spec,
                                   const OffloadPlanArrays& plan) {
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
  TeamPlanSummary summary;
  const PlannerCall call{.shape = shape,
                         .spec = spec,
                         .memory = memory,
                         .counts = counts.tokens,
                         .plan = {.slot_expert = plan.slot_expert,
                                  .rerouted = plan.rerouted,
                                  .load_before = plan.load_before,
                                  .load_after = plan.load_after,
                                  .summary = &summary}};
  choose_by_one_thread(call);
  split_sources(shape, spec.is_balanced(), counts.tokens, memory.experts(), memory.chosen(),
                plan.rerouted);
  write_loads(shape, memory, call.plan);
  planner_of(call).summarize();
  MC_INVARIANT(summary.bound_holds != 0 || !spec.is_balanced() ||
                   spec.num_spare_slots < shape.experts_per_rank(),
               "the plan leaves a rank with {} tokens, above the guaranteed {}", summary.max_load,
               summary.bound);
  return {.max_load = summary.max_load,
          .num_clones = summary.num_clones,
          .bound = summary.bound,
          .bound_holds = summary.bound_holds != 0};
}

OffloadPlan plan_offload(const TokenCounts& counts, const PlanSpec& spec) {
  require_counts_shape(counts);
  require_spec(spec, counts.num_ranks);
  const auto ranks = static_cast<size_t>(counts.num_ranks);
  const size_t slots = ranks * static_cast<size_t>(spec.num_spare_slots);
  OffloadPlan plan{.num_ranks = counts.num_ranks,
                   .num_experts = counts.num_experts,
                   .num_spare_slots = spec.num_spare_slots,
                   .slot_expert = std::vector<int64_t>(slots),
                   .rerouted = std::vector<int64_t>(ranks * slots),
                   .load_before = std::vector<int64_t>(ranks),
                   .load_after = std::vector<int64_t>(ranks)};
  const OffloadPlanSummary summary = plan_offload_to(counts, spec,
                                                     {.slot_expert = plan.slot_expert.data(),
                                                      .rerouted = plan.rerouted.data(),
                                                      .load_before = plan.load_before.data(),
                                                      .load_after = plan.load_after.data()});
  plan.max_load = summary.max_load;
  plan.num_clones = summary.num_clones;
  plan.bound = summary.bound;
  plan.bound_holds = summary.bound_holds;
  return plan;
}

}  // namespace megacore::moe
