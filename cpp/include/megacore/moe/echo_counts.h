// What a layer with clones counts: tokens of each expert, wherever they went, and sums over plans.
// Shared by the CPU and by a CUDA kernel.

#pragma once

#include <cstdint>

#include "megacore/base/host_device.h"
#include "megacore/moe/plan_spec.h"

namespace megacore::moe {

// Copies for `expert`, of those for each place: its home, and the slots that hold it.
MC_HOST_DEVICE int64_t copies_of_expert(const PlanShape& shape,
                                        const int64_t* slot_expert,
                                        const int64_t* copies_of_place,
                                        int64_t expert) {
  int64_t copies = copies_of_place[shape.place_of_expert(expert)];
  for (int64_t slot = 0; slot < shape.num_slots(); ++slot) {
    if (slot_expert[slot] == expert) {
      copies += copies_of_place[shape.place_of_slot(slot)];
    }
  }
  return copies;
}

// A plan, as the planner on the device describes it.
struct EchoReport {
  const int64_t* load_before = nullptr;  // (num_ranks)
  const PlanSummary* summary = nullptr;
  const int64_t* elapsed_ns = nullptr;  // (1)
};

// Sums over plans, in the order of EchoCounts in Python.
enum EchoSum : int {
  kNumPlans,
  kHighestBefore,
  kHighestAfter,
  kMeanLoad,
  kNumClones,
  kNumMoved,
  kBytesSent,
  kPlanUs,
  kNumEchoSums,
};

MC_HOST_DEVICE void add_report(const PlanShape& shape,
                               const EchoReport& report,
                               int64_t highest,
                               int64_t total,
                               double* sums) {
  sums[kNumPlans] += 1.0;
  sums[kHighestBefore] += static_cast<double>(highest);
  sums[kHighestAfter] += static_cast<double>(report.summary->max_load);
  sums[kMeanLoad] += static_cast<double>(total) / static_cast<double>(shape.num_ranks);
  sums[kNumClones] += static_cast<double>(report.summary->num_clones);
  sums[kNumMoved] += static_cast<double>(report.summary->num_moved);
  sums[kPlanUs] += static_cast<double>(*report.elapsed_ns) / 1e3;
}

// Writes copies_of_expert (num_experts) and adds the plan to the sums (kNumEchoSums).
void count_plan(const PlanShape& shape,
                const EchoReport& report,
                const int64_t* slot_expert,
                const int64_t* copies_of_place,
                int64_t* copies,
                double* sums);

// Adds `bytes` for each of `numel` slots whose expert is in [first, end) to the bytes sent.
void count_held(const int64_t* slot_expert,
                int64_t numel,
                int64_t first,
                int64_t end,
                int64_t bytes,
                double* sums);

}  // namespace megacore::moe
