#include <algorithm>

#include "schedules/generate.h"
#include "schedules/interleaved_order.h"

namespace megacore::pipeline {

Schedule one_f_one_b(const PipelineShape& shape, Pairs pairs) {
  const bool split = pairs == Pairs::kSplit;
  require_sizes(shape.num_ranks, 1, shape.num_microbatches, split ? 3 : 2);
  if (pairs != Pairs::kNone) {
    return build({.name = "1f1b",
                  .num_ranks = shape.num_ranks,
                  .num_chunks = 1,
                  .num_microbatches = shape.num_microbatches,
                  .group_size = 1,
                  .warmup_multiplier = 2,
                  .backward = split ? BackwardStyle::kSplit : BackwardStyle::kFused,
                  .pairs = true});
  }
  return make_schedule("1f1b", Placement::loop({.num_ranks = shape.num_ranks, .num_chunks = 1}),
                       shape.num_microbatches, 2, [&](int rank, std::vector<Action>& actions) {
                         const int warmup =
                             std::min(shape.num_ranks - rank - 1, shape.num_microbatches);
                         int forward = 0;
                         int backward = 0;
                         while (forward < warmup)
                           actions.push_back({rank, ActionKind::kForward, forward++});
                         while (forward < shape.num_microbatches) {
                           actions.push_back({rank, ActionKind::kForward, forward++});
                           actions.push_back({rank, ActionKind::kBackward, backward++});
                         }
                         while (backward < forward)
                           actions.push_back({rank, ActionKind::kBackward, backward++});
                       });
}

}  // namespace megacore::pipeline
