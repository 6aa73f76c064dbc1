#include <chrono>

#include "arguments.h"
#include "cpu.h"
#include "megacore/moe/offload_plan.h"

namespace megacore::ops {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> plan_offload(
    Tensor counts,
    int64_t rank,
    int64_t num_spare_slots,
    bool is_balanced,
    int64_t tolerance,
    int64_t min_imbalance,
    int64_t domain_size) {
  using Clock = std::chrono::steady_clock;
  const moe::PlanSpec spec = checked_spec(counts, rank, num_spare_slots, is_balanced, tolerance,
                                          min_imbalance, domain_size);
  const int64_t ranks = counts.size(0), experts = counts.size(1);
  counts = contiguous(std::move(counts));
  Tensor slot_expert = empty({ranks, num_spare_slots}, kDTypes.int64);
  Tensor sent = empty({ranks, num_spare_slots}, kDTypes.int64);
  Tensor arriving = empty({ranks, experts / ranks + num_spare_slots}, kDTypes.int64);
  Tensor load_before = empty({ranks}, kDTypes.int64);
  Tensor load_after = empty({ranks}, kDTypes.int64);
  Tensor summary = empty({moe::kPlanNumbers}, kDTypes.int64);
  const auto start = Clock::now();
  moe::plan_offload_of_rank({counts.data<int64_t>(), ranks, experts}, spec,
                            {.rank = rank,
                             .slot_expert = slot_expert.mutable_data<int64_t>(),
                             .sent = sent.mutable_data<int64_t>(),
                             .arriving = arriving.mutable_data<int64_t>(),
                             .load_before = load_before.mutable_data<int64_t>(),
                             .load_after = load_after.mutable_data<int64_t>(),
                             .summary = summary.mutable_data<moe::PlanSummary>()});
  const std::chrono::nanoseconds elapsed = Clock::now() - start;
  Tensor elapsed_ns = empty({1}, kDTypes.int64);
  *elapsed_ns.mutable_data<int64_t>() = elapsed.count();
  return {std::move(slot_expert), std::move(sent),    std::move(arriving),  std::move(load_before),
          std::move(load_after),  std::move(summary), std::move(elapsed_ns)};
}

Tensor reroute(Tensor expert_ids, Tensor total, Tensor first, Tensor slot_expert, Tensor tokens) {
  expert_ids = contiguous(std::move(expert_ids));
  total = contiguous(std::move(total));
  first = contiguous(std::move(first));
  slot_expert = contiguous(std::move(slot_expert));
  tokens = contiguous(std::move(tokens));
  const moe::SourceRow row = checked_source_row(expert_ids, total, first, slot_expert, tokens);
  Tensor places = empty_like(expert_ids);
  moe::reroute_copies(expert_ids.data<int64_t>(), expert_ids.numel(), row,
                      places.mutable_data<int64_t>());
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
  slot_expert = contiguous(std::move(slot_expert));
  load_before = contiguous(std::move(load_before));
  summary = contiguous(std::move(summary));
  copies_of_place = contiguous(std::move(copies_of_place));
  const moe::EchoReport report =
      checked_report(shape, load_before, summary, elapsed_ns, copies_of_place);
  Tensor copies = empty({num_experts}, kDTypes.int64);
  moe::count_plan(shape, report, slot_expert.data<int64_t>(), copies_of_place.data<int64_t>(),
                  copies.mutable_data<int64_t>(), sums.mutable_data<double>());
  return copies;
}

void count_held(Tensor sums, Tensor slot_expert, int64_t first, int64_t end, int64_t num_bytes) {
  check_echo_sums(sums);
  MC_REQUIRE(slot_expert.dtype() == kDTypes.int64, "slot_expert must be int64");
  slot_expert = contiguous(std::move(slot_expert));
  moe::count_held(slot_expert.data<int64_t>(), slot_expert.numel(), first, end, num_bytes,
                  sums.mutable_data<double>());
}

}  // namespace megacore::ops
