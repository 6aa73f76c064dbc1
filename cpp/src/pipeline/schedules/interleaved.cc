// Loop placement, several chunks per rank: interleaved 1F1B and its relatives with a split
// backward.

#include <algorithm>

#include "schedules/generate.h"
#include "schedules/interleaved_order.h"

namespace megacore::pipeline {
namespace {

InterleavedOrder order_of(const InterleavedShape& shape, int group_size) {
  return {.name = "interleaved_1f1b",
          .num_ranks = shape.num_ranks,
          .num_chunks = shape.num_chunks,
          .num_microbatches = shape.num_microbatches,
          .group_size = group_size,
          .warmup_multiplier = shape.warmup_multiplier,
          .backward = shape.pairs == Pairs::kSplit ? BackwardStyle::kSplit : BackwardStyle::kFused,
          .pairs = shape.pairs != Pairs::kNone};
}

// The checks all have in common; the group size is 1 where none is given.
void require_order(const InterleavedOrder& order) {
  require_sizes(order.num_ranks, order.num_chunks, order.num_microbatches,
                actions_per_stage(order.backward));
  MC_REQUIRE(order.group_size >= 1, "group_size must be at least 1, got {}", order.group_size);
  MC_REQUIRE(order.warmup_multiplier == 1 || order.warmup_multiplier == 2,
             "warmup_multiplier must be 1 or 2, got {}", order.warmup_multiplier);
}

}  // namespace

int best_group_size(const InterleavedShape& shape) {
  require_sizes(shape.num_ranks, shape.num_chunks, shape.num_microbatches);
  // Checked against all group sizes by the tests: a group reaches the smallest makespan exactly
  // when neither it nor the last group is smaller than p; with fewer than p microbatches, when it
  // holds all.
  const int p = shape.num_ranks;
  const int m = shape.num_microbatches;
  int group_size = std::min(p, m);
  while (m % group_size != 0 && m % group_size < p) ++group_size;
  return group_size;
}

int interleaved_warmup(const InterleavedShape& shape, int rank) {
  InterleavedOrder order = order_of(shape, shape.group_size.value_or(1));
  require_order(order);
  MC_REQUIRE(0 <= rank && rank < shape.num_ranks, "rank must be from 0 to {}, got {}",
             shape.num_ranks - 1, rank);
  if (!shape.group_size) order.group_size = best_group_size(shape);
  return warmup_of(order, rank);
}

Schedule interleaved_one_f_one_b(const InterleavedShape& shape) {
  InterleavedOrder order = order_of(shape, shape.group_size.value_or(1));
  require_order(order);
  if (!shape.group_size) order.group_size = best_group_size(shape);
  return build_or_refuse(order);
}

Schedule group_interleaved(const GroupedShape& shape) {
  const int half = (shape.num_ranks + 1) / 2;
  InterleavedOrder order{.name = "group_interleaved",
                         .num_ranks = shape.num_ranks,
                         .num_chunks = shape.num_chunks,
                         .num_microbatches = shape.num_microbatches,
                         .group_size = shape.group_size.value_or(half),
                         .warmup_multiplier = 1,
                         .smallest_group = half,
                         .backward = BackwardStyle::kSplit};
  require_sizes(order.num_ranks, order.num_chunks, order.num_microbatches, 3);
  if (shape.group_size) {
    MC_REQUIRE(*shape.group_size >= half,
               "group_size is {}; group_interleaved needs at least half of the {} ranks: {}",
               *shape.group_size, shape.num_ranks, half);
    return build_or_refuse(order);
  }
  while (!runs(order)) ++order.group_size;
  return build(order);
}

Schedule interleaved_zero_bubble(const GroupedShape& shape) {
  InterleavedOrder order{.name = "interleaved_zb",
                         .num_ranks = shape.num_ranks,
                         .num_chunks = shape.num_chunks,
                         .num_microbatches = shape.num_microbatches,
                         .group_size = shape.group_size.value_or(1),
                         .warmup_multiplier = 1,
                         .backward = BackwardStyle::kLateWeight};
  require_order(order);
  if (!shape.group_size) {
    order.group_size = best_group_size({.num_ranks = shape.num_ranks,
                                        .num_chunks = shape.num_chunks,
                                        .num_microbatches = shape.num_microbatches});
  }
  return build_or_refuse(order);
}

}  // namespace megacore::pipeline
