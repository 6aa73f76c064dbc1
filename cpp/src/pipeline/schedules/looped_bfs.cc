#include "schedules/generate.h"

namespace megacore::pipeline {

Schedule looped_bfs(const ChunkedShape& shape) {
  const auto [p, v, m] = shape;
  require_sizes(p, v, m);
  return make_schedule(
      "looped_bfs", Placement::loop({.num_ranks = p, .num_chunks = v}), m, 2,
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
