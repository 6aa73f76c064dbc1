#include "device.h"
#include "megacore/cuda/echo_counts.h"
#include "megacore/cuda/plan_offload.h"
#include "megacore/cuda/reroute.h"
#include "operations.h"

namespace megacore::ops {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> plan_offload(
    Tensor counts,
    int64_t rank,
    int64_t num_spare_slots,
    bool is_balanced,
    int64_t tolerance,
    int64_t min_imbalance,
    int64_t domain_size) {
  const moe::PlanSpec spec = checked_spec(counts, rank, num_spare_slots, is_balanced, tolerance,
                                          min_imbalance, domain_size);
  const Device device(counts);
  const int64_t ranks = counts.size(0), experts = counts.size(1);
  counts = device.contiguous(std::move(counts));
  Tensor slot_expert = device.empty({ranks, num_spare_slots}, kDTypes.int64);
  Tensor sent = device.empty({ranks, num_spare_slots}, kDTypes.int64);
  Tensor arriving = device.empty({ranks, experts / ranks + num_spare_slots}, kDTypes.int64);
  Tensor load_before = device.empty({ranks}, kDTypes.int64);
  Tensor load_after = device.empty({ranks}, kDTypes.int64);
  Tensor summary = device.empty({moe::kPlanNumbers}, kDTypes.int64);
  Tensor elapsed_ns = device.empty({1}, kDTypes.int64);
  cuda::plan_offload(
      {.shape = {.num_ranks = ranks, .num_experts = experts, .num_spare_slots = num_spare_slots},
       .spec = spec,
       .counts = counts.data<int64_t>(),
       .plan = {.rank = rank,
                .slot_expert = slot_expert.mutable_data<int64_t>(),
                .sent = sent.mutable_data<int64_t>(),
                .arriving = arriving.mutable_data<int64_t>(),
                .load_before = load_before.mutable_data<int64_t>(),
                .load_after = load_after.mutable_data<int64_t>(),
                .summary = summary.mutable_data<moe::PlanSummary>()},
       .elapsed_ns = elapsed_ns.mutable_data<int64_t>()},
      device.stream());
  return {std::move(slot_expert), std::move(sent),    std::move(arriving),  std::move(load_before),
          std::move(load_after),  std::move(summary), std::move(elapsed_ns)};
}

Tensor reroute(Tensor expert_ids, Tensor total, Tensor first, Tensor slot_expert, Tensor tokens) {
  const Device device(expert_ids, total, first, slot_expert, tokens);
  expert_ids = device.contiguous(std::move(expert_ids));
  total = device.contiguous(std::move(total));
  first = device.contiguous(std::move(first));
  slot_expert = device.contiguous(std::move(slot_expert));
  tokens = device.contiguous(std::move(tokens));
  const moe::SourceRow row = checked_source_row(expert_ids, total, first, slot_expert, tokens);
  Tensor places = device.empty_like(expert_ids);
  const auto [row_map, counts] = sort_by_expert(other_owner_of(expert_ids), row.shape.num_experts);
  cuda::reroute({.expert_of = expert_ids.data<int64_t>(),
                 .row_map = row_map.data<int64_t>(),
                 .counts = counts.data<int64_t>(),
                 .numel = expert_ids.numel(),
                 .row = row,
                 .place_of = places.mutable_data<int64_t>()},
                device.stream());
  return places;
}

Tensor count_plan(Tensor sums,
                  Tensor slot_expert,
                  Tensor load_before,
                  Tensor summary,
                  Tensor elapsed_ns,
                  Tensor copies_of_place,
                  int64_t num_experts) {
  check_echo_sums(sums);
  const moe::PlanShape shape = checked_slots(slot_expert, num_experts);
  const Device device(sums, slot_expert, load_before, summary, elapsed_ns, copies_of_place);
  slot_expert = device.contiguous(std::move(slot_expert));
  load_before = device.contiguous(std::move(load_before));
  summary = device.contiguous(std::move(summary));
  copies_of_place = device.contiguous(std::move(copies_of_place));
  const moe::EchoReport report =
      checked_report(shape, load_before, summary, elapsed_ns, copies_of_place);
  Tensor copies = device.empty({num_experts}, kDTypes.int64);
  cuda::count_plan(shape, report, slot_expert.data<int64_t>(), copies_of_place.data<int64_t>(),
                   copies.mutable_data<int64_t>(), sums.mutable_data<double>(), device.stream());
  return copies;
}

void count_held(Tensor sums, Tensor slot_expert, int64_t first, int64_t end, int64_t num_bytes) {
  check_echo_sums(sums);
  MC_REQUIRE(slot_expert.dtype() == kDTypes.int64, "slot_expert must be int64");
  const Device device(sums, slot_expert);
  slot_expert = device.contiguous(std::move(slot_expert));
  cuda::count_held(slot_expert.data<int64_t>(), slot_expert.numel(), first, end, num_bytes,
                   sums.mutable_data<double>(), device.stream());
}

}  // namespace megacore::ops
