#include "generate.h"

namespace megacore::pipeline {

Schedule no_pipelining(const ChunkedShape& shape) {
  MC_REQUIRE(shape.num_ranks == 1,
             "num_ranks is ",
             shape.num_ranks,
             "; no_pipelining runs on 1 rank. With more ranks use gpipe or 1f1b");
  require_sizes(1, shape.num_chunks, shape.num_microbatches);
  return make_schedule("no_pipelining",
                       Placement::loop({.num_ranks = 1, .num_chunks = shape.num_chunks}),
                       shape.num_microbatches,
                       2,
                       [&](int, std::vector<Action>& actions) {
                         for (int microbatch = 0; microbatch < shape.num_microbatches;
                              ++microbatch) {
                           for (int stage = 0; stage < shape.num_chunks; ++stage) {
                             actions.push_back({stage, ActionKind::kForward, microbatch});
                           }
                           for (int stage = shape.num_chunks - 1; stage >= 0; --stage) {
                             actions.push_back({stage, ActionKind::kBackward, microbatch});
                           }
                         }
                       });
}

Schedule looped_bfs(const ChunkedShape& shape) {
  const auto [p, v, m] = shape;
  require_sizes(p, v, m);
  return make_schedule(
      "looped_bfs",
      Placement::loop({.num_ranks = p, .num_chunks = v}),
      m,
      2,
      [&](int rank, std::vector<Action>& actions) {
        const auto stage_of = [&](int chunk) { return chunk * shape.num_ranks + rank; };
        for (int chunk = 0; chunk < shape.num_chunks; ++chunk) {
          for (int microbatch = 0; microbatch < shape.num_microbatches; ++microbatch) {
            actions.push_back({stage_of(chunk), ActionKind::kForward, microbatch});
          }
        }
        for (int chunk = shape.num_chunks - 1; chunk >= 0; --chunk) {
          for (int microbatch = shape.num_microbatches - 1; microbatch >= 0; --microbatch) {
            actions.push_back({stage_of(chunk), ActionKind::kBackward, microbatch});
          }
        }
      });
}

}  // namespace megacore::pipeline
