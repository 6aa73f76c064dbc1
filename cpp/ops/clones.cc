#include "arguments.h"
#include "cpu.h"

namespace megacore::ops {

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
                  Tensor rerouted,
                  Tensor load_before,
                  Tensor summary,
                  Tensor elapsed_ns,
                  Tensor copies_of_place,
                  int64_t num_experts) {
  check_echo_sums(sums);
  const moe::PlanShape shape = checked_slots(slot_expert, num_experts);
  slot_expert = contiguous(std::move(slot_expert));
  rerouted = contiguous(std::move(rerouted));
  load_before = contiguous(std::move(load_before));
  summary = contiguous(std::move(summary));
  copies_of_place = contiguous(std::move(copies_of_place));
  const moe::EchoReport report =
      checked_report(shape, rerouted, load_before, summary, elapsed_ns, copies_of_place);
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
