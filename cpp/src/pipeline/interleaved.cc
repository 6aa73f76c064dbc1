#include <algorithm>

#include "dependencies.h"
#include "generate.h"
#include "megacore/pipeline/schedule_table.h"

namespace megacore::pipeline {
namespace {

using base::concat;

Schedule build(const InterleavedShape& shape) {
  const auto [p, v, m, group_size] = shape;
  const std::vector<TableEntry> table =
      schedule_table({.num_microbatches = m, .num_chunks = v, .group_size = group_size.value()});
  const auto append_rank = [&](int rank, std::vector<Action>& actions) {
    const auto forward = [&](const TableEntry& entry) {
      actions.push_back(
          {entry.chunk * shape.num_ranks + rank, ActionKind::kForward, entry.microbatch});
    };
    const auto backward = [&](const TableEntry& entry) {
      const int chunk = shape.num_chunks - 1 - entry.chunk;
      actions.push_back({chunk * shape.num_ranks + rank, ActionKind::kBackward, entry.microbatch});
    };
    const auto warmup = static_cast<size_t>(interleaved_warmup(shape, rank));
    for (size_t k = 0; k < warmup; ++k) forward(table[k]);
    for (size_t k = warmup; k < table.size(); ++k) {
      forward(table[k]);
      backward(table[k - warmup]);
    }
    for (size_t k = table.size() - warmup; k < table.size(); ++k) backward(table[k]);
  };
  return make_schedule(
      "interleaved_1f1b", Placement::loop({.num_ranks = p, .num_chunks = v}), m, append_rank);
}

// Sizes for which the order is known to run: no group is smaller than p, or there is one group
// only.
bool surely_runs(const InterleavedShape& shape) {
  const int group_size = shape.group_size.value();
  if (shape.num_chunks == 1 || group_size >= shape.num_microbatches) return true;
  const int last = shape.num_microbatches % group_size;
  return group_size >= shape.num_ranks && (last == 0 || last >= shape.num_ranks);
}

bool runs(const InterleavedShape& shape) {
  if (surely_runs(shape)) return true;
  const Schedule schedule = build(shape);
  return is_complete(schedule,
                     run_in_order(schedule, [](int64_t, const Action&, const Dependencies&) {}));
}

// The legal values nearest to `value` on either side, at most `limit`: "4 or 6".
// REQUIRES: runs_with(x) for some x < value or some x in (value, limit].
template <typename RunsWith>
std::string nearest(int value, int limit, const RunsWith& runs_with) {
  int below = value - 1;
  while (below >= 1 && !runs_with(below)) --below;
  int above = value + 1;
  while (above <= limit && !runs_with(above)) ++above;
  if (above > limit) return concat(below);
  return below >= 1 ? concat(below, " or ", above) : concat(above);
}

[[noreturn]] void refuse(const InterleavedShape& shape) {
  const auto [p, v, m, group_size] = shape;
  const int group = group_size.value();
  // One group of all microbatches always runs; so do as many microbatches as one group holds.
  const std::string groups = nearest(group, m, [&](int candidate) {
    return runs({.num_ranks = p, .num_chunks = v, .num_microbatches = m, .group_size = candidate});
  });
  const std::string microbatches = nearest(m, m - m % group + group, [&](int candidate) {
    return runs(
        {.num_ranks = p, .num_chunks = v, .num_microbatches = candidate, .group_size = group});
  });
  const int last = m % group;
  const std::string reason = group < p
                                 ? concat("a group has fewer microbatches than there are ranks")
                                 : concat("the last group has ",
                                          last,
                                          last == 1 ? " microbatch" : " microbatches",
                                          ", fewer than there are ranks");
  throw std::invalid_argument(concat("interleaved_1f1b with num_ranks ",
                                     p,
                                     ", num_chunks ",
                                     v,
                                     ", num_microbatches ",
                                     m,
                                     " and group_size ",
                                     group,
                                     " deadlocks: ",
                                     reason,
                                     ". Nearest legal group_size: ",
                                     groups,
                                     "; or, with this group_size, nearest legal num_microbatches: ",
                                     microbatches));
}

}  // namespace

int interleaved_warmup(const InterleavedShape& shape, int rank) {
  const int64_t ranks_after = shape.num_ranks - rank - 1;
  const int64_t all = static_cast<int64_t>(shape.num_chunks) * shape.num_microbatches;
  if (shape.num_chunks == 1) return static_cast<int>(std::min(ranks_after, all));
  const int64_t other_chunks =
      static_cast<int64_t>(shape.num_chunks - 1) * shape.group_size.value();
  return static_cast<int>(std::min(2 * ranks_after + other_chunks, all));
}

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

Schedule interleaved_one_f_one_b(const InterleavedShape& shape) {
  require_sizes(shape.num_ranks, shape.num_chunks, shape.num_microbatches);
  InterleavedShape chosen = shape;
  if (!chosen.group_size) chosen.group_size = best_group_size(shape);
  MC_REQUIRE(
      *chosen.group_size >= 1, "group_size is ", *chosen.group_size, "; it must be at least 1");
  if (!runs(chosen)) refuse(chosen);
  return build(chosen);
}

}  // namespace megacore::pipeline
