#include "megacore/moe/echo_counts.h"

#include <algorithm>
#include <numeric>

#include "megacore/base/check.h"

namespace megacore::moe {

void count_plan(const PlanShape& shape,
                const EchoReport& report,
                const int64_t* slot_expert,
                const int64_t* copies_of_place,
                int64_t* copies,
                double* sums) {
  const int64_t ranks = shape.num_ranks;
  MC_REQUIRE(ranks >= 1 && shape.num_experts % ranks == 0 && shape.num_spare_slots >= 0,
             "{} experts do not divide over {} ranks", shape.num_experts, ranks);
  for (int64_t expert = 0; expert < shape.num_experts; ++expert) {
    copies[expert] = copies_of_expert(shape, slot_expert, copies_of_place, expert);
  }
  const int64_t* loads = report.load_before;
  add_report(shape, report, *std::max_element(loads, loads + ranks),
             std::accumulate(loads, loads + ranks, int64_t{0}), sums);
}

void count_held(const int64_t* slot_expert,
                int64_t numel,
                int64_t first,
                int64_t end,
                int64_t bytes,
                double* sums) {
  const auto held = std::count_if(slot_expert, slot_expert + numel,
                                  [=](int64_t expert) { return expert >= first && expert < end; });
  sums[kBytesSent] += static_cast<double>(held * bytes);
}

}  // namespace megacore::moe
