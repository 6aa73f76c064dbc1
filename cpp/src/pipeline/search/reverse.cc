#include "search/reverse.h"

#include <algorithm>
#include <utility>

namespace megacore::pipeline {

DueTimes due_times_of(const Orders& orders,
                      const std::vector<double>& starts,
                      const Instance& instance) {
  const size_t count =
      static_cast<size_t>(instance.num_stages()) * static_cast<size_t>(instance.num_microbatches);
  DueTimes due{.forward = std::vector<double>(count), .backward = std::vector<double>(count)};
  std::vector<int> forwards(static_cast<size_t>(instance.num_stages()), 0);
  std::vector<int> backwards = forwards;
  for (size_t i = 0; i < orders.tokens.size(); ++i) {
    const auto [stage, part] = orders.tokens[i];
    const auto s = static_cast<size_t>(stage);
    if (part == Part::kForward) due.forward[instance.at(stage, forwards[s]++)] = starts[i];
    if (part == Part::kBackward) due.backward[instance.at(stage, backwards[s]++)] = starts[i];
  }
  return due;
}

DueTimes drawn_out(const DueTimes& due, const Instance& few, const Instance& more, double longer) {
  const int half = few.num_microbatches / 2;
  const int extra = more.num_microbatches - few.num_microbatches;
  const auto draw_out = [&](const std::vector<double>& from) {
    std::vector<double> to;
    for (int stage = 0; stage < more.num_stages(); ++stage) {
      for (int k = 0; k < more.num_microbatches; ++k) {
        const int passed = std::clamp(k - half, 0, extra);  // of the extra ones
        to.push_back(from[few.at(stage, k - passed)] + longer * passed / extra);
      }
    }
    return to;
  };
  return {.forward = draw_out(due.forward), .backward = draw_out(due.backward)};
}

Instance reversed(const Instance& instance) {
  Instance other = instance;
  std::swap(other.forward, other.backward);
  return other;
}

Orders reversed(const Orders& orders) {
  Orders other = orders;
  for (size_t rank = 0; rank + 1 < other.offsets.size(); ++rank) {
    std::reverse(other.tokens.begin() + static_cast<std::ptrdiff_t>(other.offsets[rank]),
                 other.tokens.begin() + static_cast<std::ptrdiff_t>(other.offsets[rank + 1]));
  }
  for (Token& token : other.tokens) {
    token.part = token.part == Part::kForward ? Part::kBackward : Part::kForward;
  }
  return other;
}

DueTimes reversed(const DueTimes& due, const Instance& instance, double end) {
  DueTimes other = due;
  const int m = instance.num_microbatches;
  for (int stage = 0; stage < instance.num_stages(); ++stage) {
    const auto s = static_cast<size_t>(stage);
    for (int k = 0; k < m; ++k) {
      const size_t from = instance.at(stage, m - 1 - k);
      other.forward[instance.at(stage, k)] = end - due.backward[from] - instance.backward[s];
      other.backward[instance.at(stage, k)] = end - due.forward[from] - instance.forward[s];
    }
  }
  return other;
}

}  // namespace megacore::pipeline
