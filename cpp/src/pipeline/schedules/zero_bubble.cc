// One stage per rank with a split backward: ZB-H1 and ZB-H2.

#include <algorithm>

#include "schedules/generate.h"
#include "schedules/interleaved_order.h"

namespace megacore::pipeline {

Schedule zb_h1(const PipelineShape& shape) {
  require_sizes(shape.num_ranks, 1, shape.num_microbatches, 3);
  return build({.name = "zb_h1",
                .num_ranks = shape.num_ranks,
                .num_chunks = 1,
                .num_microbatches = shape.num_microbatches,
                .group_size = 1,
                .warmup_multiplier = 1,
                .backward = BackwardStyle::kLateWeight});
}

Schedule zb_h2(const PipelineShape& shape) {
  const auto [p, m] = shape;
  require_sizes(p, 1, m, 3);
  return make_schedule("zb_h2", Placement::loop({.num_ranks = p, .num_chunks = 1}), m, 3,
                       [&](int rank, std::vector<Action>& actions) {
                         // The first I comes back 2(p-r)-1 slots after the first F: until then F.
                         // Then I and F alternate, one I every 2 slots, and the ranks switch one
                         // after the other, the first one first, to I W F, one I every 3 slots.
                         // Without an F left, W takes its slot.
                         const int warmup =
                             std::min(2 * (shape.num_ranks - rank) - 1, shape.num_microbatches);
                         const int late = 2 * rank;
                         int forward = 0;
                         int weight = 0;
                         while (forward < warmup)
                           actions.push_back({rank, ActionKind::kForward, forward++});
                         for (int k = 0; k < shape.num_microbatches; ++k) {
                           actions.push_back({rank, ActionKind::kBackwardInput, k});
                           const bool last_forward_ran = forward == shape.num_microbatches;
                           if (k >= late || last_forward_ran)
                             actions.push_back({rank, ActionKind::kBackwardWeight, weight++});
                           if (!last_forward_ran)
                             actions.push_back({rank, ActionKind::kForward, forward++});
                         }
                         while (weight < shape.num_microbatches)
                           actions.push_back({rank, ActionKind::kBackwardWeight, weight++});
                       });
}

}  // namespace megacore::pipeline
