#include "schedules/generate.h"

namespace megacore::pipeline {

Schedule no_pipelining(const ChunkedShape& shape) {
  MC_REQUIRE(shape.num_ranks == 1,
             "num_ranks is {}; no_pipelining runs on 1 rank. With more ranks use gpipe or 1f1b",
             shape.num_ranks);
  require_sizes(1, shape.num_chunks, shape.num_microbatches);
  return make_schedule(
      "no_pipelining", Placement::loop({.num_ranks = 1, .num_chunks = shape.num_chunks}),
      shape.num_microbatches, 2, [&](int, std::vector<Action>& actions) {
        for (int microbatch = 0; microbatch < shape.num_microbatches; ++microbatch) {
          for (int stage = 0; stage < shape.num_chunks; ++stage) {
            actions.push_back({stage, ActionKind::kForward, microbatch});
          }
          for (int stage = shape.num_chunks - 1; stage >= 0; --stage) {
            actions.push_back({stage, ActionKind::kBackward, microbatch});
          }
        }
      });
}

Schedule gpipe(const PipelineShape& shape) {
  require_sizes(shape.num_ranks, 1, shape.num_microbatches);
  return make_schedule(
      "gpipe", Placement::loop({.num_ranks = shape.num_ranks, .num_chunks = 1}),
      shape.num_microbatches, 2, [&](int rank, std::vector<Action>& actions) {
        for (const ActionKind kind : {ActionKind::kForward, ActionKind::kBackward}) {
          for (int microbatch = 0; microbatch < shape.num_microbatches; ++microbatch) {
            actions.push_back({rank, kind, microbatch});
          }
        }
      });
}

}  // namespace megacore::pipeline
