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
  RankPlan plan = {};
};

TeamPlanner<SoloTeam, SoloTeam> planner_of(const PlannerCall& call) {
  const SoloTeam solo;
  return {solo, solo, call.shape, call.spec, call.memory, call.counts, call.plan};
}

// Everything is inlined here, because only then are its loops compiled once per vector width.
MC_VECTOR_CLONES_V4 __attribute__((flatten)) void choose_by_one_thread(const PlannerCall& call) {
  planner_of(call).choose();
}

void write_loads(const PlanShape& shape, const PlanMemory& memory, const RankPlan& plan) {
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

void write_of_rank(const PlanShape& shape,
                   const int64_t* counts,
                   const SourceTokens& split,
                   const RankPlan& plan) {
  const int64_t local = shape.experts_per_rank();
  const int64_t first = plan.rank * local;
  const int64_t first_slot = plan.rank * shape.num_spare_slots;
  std::vector<size_t> here;      // clones in slots of the rank
  std::vector<size_t> of_homes;  // clones of its home experts
  std::fill_n(plan.sent, shape.num_slots(), 0);
  for (size_t i = 0; i < split.num_clones(); ++i) {
    plan.sent[split.slot[i]] = split.of_source(plan.rank)[i];
    if (split.slot[i] >= first_slot && split.slot[i] < first_slot + shape.num_spare_slots) {
      here.push_back(i);
    }
    if (shape.home(split.expert[i]) == plan.rank) {
      of_homes.push_back(i);
    }
  }
  for (int64_t source = 0; source < shape.num_ranks; ++source) {
    int64_t* row = plan.arriving + source * shape.places_per_rank();
    std::copy_n(counts + source * shape.num_experts + first, local, row);
    std::fill_n(row + local, shape.num_spare_slots, 0);
    const int32_t* tokens = split.of_source(source);
    for (const size_t i : of_homes) {
      row[split.expert[i] - first] -= tokens[i];
    }
    for (const size_t i : here) {
      row[local + split.slot[i] - first_slot] = tokens[i];
    }
  }
}

// `write_tokens` gets the tokens of all sources for all clones.
template <typename WriteTokens>
void plan_with(const TokenCounts& counts,
               const PlanSpec& spec,
               const RankPlan& plan,
               const WriteTokens& write_tokens) {
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
  const PlannerCall call{
      .shape = shape, .spec = spec, .memory = memory, .counts = counts.tokens, .plan = plan};
  choose_by_one_thread(call);
  write_tokens(shape, split_sources(shape, spec.is_balanced(), counts.tokens, memory.experts(),
                                    memory.chosen()));
  write_loads(shape, memory, plan);
  planner_of(call).summarize();
  const PlanSummary& summary = *plan.summary;
  MC_INVARIANT(summary.bound_holds != 0 || !spec.is_balanced() ||
                   spec.num_spare_slots < shape.experts_per_rank(),
               "the plan leaves a rank with {} tokens, above the guaranteed {}", summary.max_load,
               summary.bound);
}

}  // namespace

void plan_offload_of_rank(const TokenCounts& counts, const PlanSpec& spec, const RankPlan& plan) {
  plan_with(counts, spec, plan, [&](const PlanShape& shape, const SourceTokens& split) {
    write_of_rank(shape, counts.tokens, split, plan);
  });
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
  PlanSummary summary;
  const RankPlan arrays = {.slot_expert = plan.slot_expert.data(),
                           .load_before = plan.load_before.data(),
                           .load_after = plan.load_after.data(),
                           .summary = &summary};
  const auto write_rerouted = [&](const PlanShape& shape, const SourceTokens& split) {
    for (int64_t source = 0; source < shape.num_ranks; ++source) {
      int64_t* row = plan.rerouted.data() + source * shape.num_slots();
      for (size_t i = 0; i < split.num_clones(); ++i) {
        row[split.slot[i]] = split.of_source(source)[i];
      }
    }
  };
  plan_with(counts, spec, arrays, write_rerouted);
  plan.max_load = summary.max_load;
  plan.num_clones = summary.num_clones;
  plan.bound = summary.bound;
  plan.bound_holds = summary.bound_holds != 0;
  return plan;
}

}  // namespace megacore::moe
