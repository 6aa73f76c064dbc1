#include "generate.h"

namespace megacore::pipeline {

Schedule gpipe(const PipelineShape& shape) {
  require_sizes(shape.num_ranks, 1, shape.num_microbatches);
  return make_schedule(
      "gpipe",
      Placement::loop({.num_ranks = shape.num_ranks, .num_chunks = 1}),
      shape.num_microbatches,
      2,
      [&](int rank, std::vector<Action>& actions) {
        for (const ActionKind kind : {ActionKind::kForward, ActionKind::kBackward}) {
          for (int microbatch = 0; microbatch < shape.num_microbatches; ++microbatch) {
            actions.push_back({rank, kind, microbatch});
          }
        }
      });
}

}  // namespace megacore::pipeline
