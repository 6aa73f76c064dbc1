#include "search/unroll.h"

#include <algorithm>
#include <utility>

namespace megacore::pipeline {
namespace {

constexpr size_t kMostKernels = 24;

// Whether the tokens hold every (stage, part) of the rank `count` times.
bool is_kernel(std::span<const Token> tokens, size_t count, std::vector<size_t>& counts) {
  for (const Token& token : tokens) counts[slot_of(token)] = 0;
  for (const Token& token : tokens) {
    if (++counts[slot_of(token)] > count) return false;
  }
  return true;
}

// `orders` with the `count` microbatches after `moment` repeated, or empty orders.
Orders repeated(const Orders& orders,
                const std::vector<double>& starts,
                const Instance& few,
                const Instance& more,
                double moment,
                int count) {
  Orders result;
  result.tokens.reserve(more.num_actions());
  std::vector<size_t> counts(static_cast<size_t>(few.num_stages()) * 3);
  const int repeats = (more.num_microbatches - few.num_microbatches) / count;
  for (int rank = 0; rank < few.num_ranks(); ++rank) {
    const auto r = static_cast<size_t>(rank);
    const auto first = starts.begin() + static_cast<std::ptrdiff_t>(orders.offsets[r]);
    const auto last = starts.begin() + static_cast<std::ptrdiff_t>(orders.offsets[r + 1]);
    const auto begin =
        static_cast<size_t>(std::lower_bound(first, last, moment - kSameTime) - starts.begin());
    const size_t size =
        few.placement.stages_of(rank).size() * static_cast<size_t>(count) * (few.split ? 3 : 2);
    if (begin + size > orders.offsets[r + 1]) return {};
    const auto kernel = std::span(orders.tokens).subspan(begin, size);
    if (!is_kernel(kernel, static_cast<size_t>(count), counts)) return {};
    const auto row = orders.tokens.begin();
    result.tokens.insert(result.tokens.end(), row + static_cast<std::ptrdiff_t>(orders.offsets[r]),
                         row + static_cast<std::ptrdiff_t>(begin));
    for (int i = 0; i < repeats; ++i) {
      result.tokens.insert(result.tokens.end(), kernel.begin(), kernel.end());
    }
    result.tokens.insert(result.tokens.end(), row + static_cast<std::ptrdiff_t>(begin),
                         row + static_cast<std::ptrdiff_t>(orders.offsets[r + 1]));
    result.offsets.push_back(result.tokens.size());
  }
  return result;
}

}  // namespace

std::optional<Orders> unroll(const Orders& orders,
                             const std::vector<double>& starts,
                             const Instance& few,
                             const Instance& more) {
  const int extra = more.num_microbatches - few.num_microbatches;
  OrderTimer timer(more);
  std::optional<Orders> best;
  double best_makespan = kNever;
  size_t num_kernels = 0;
  for (const int count : {1, 2, 3, 4, few.num_ranks()}) {
    if (extra % count != 0 || count > few.num_microbatches) continue;
    // Moments: when rank 0 starts something, from the middle on.
    for (size_t i = orders.offsets[1] / 2; i < orders.offsets[1] * 7 / 8; ++i) {
      Orders longer = repeated(orders, starts, few, more, starts[i], count);
      if (longer.tokens.empty()) continue;
      const double makespan = timer.makespan(longer);
      if (makespan < best_makespan && fits_memory(longer, more)) {
        best_makespan = makespan;
        best = std::move(longer);
      }
      if (++num_kernels >= kMostKernels) return best;
    }
  }
  return best;
}

}  // namespace megacore::pipeline
