#include "bounds/chain_bounds.h"

#include <algorithm>
#include <limits>

namespace megacore::pipeline {

ChainBounds::ChainBounds(const Placement& placement,
                         const StageCosts& costs,
                         int num_microbatches,
                         bool split_backward)
    : placement_(placement),
      num_microbatches_(num_microbatches),
      split_(split_backward),
      forward_(costs.forward),
      backward_(split_backward ? costs.input : costs.backward),
      weight_(split_backward ? costs.weight : std::vector<double>(costs.weight.size(), 0.0)),
      forward_head_(forward_.size()),
      backward_head_(forward_.size()),
      forward_tail_(forward_.size()),
      backward_tail_(forward_.size()) {
  const int num_stages = placement.num_stages();
  // Latency of the message between a stage and the one before it.
  const auto hop = [&](int stage) {
    return placement.rank_of(stage - 1) == placement.rank_of(stage) ? 0.0 : costs.send;
  };
  for (int s = 0; s < num_stages; ++s) {
    const bool first = placement.previous(s) < 0;
    forward_head_[at(s)] = first ? 0.0 : forward_head_[at(s - 1)] + forward_[at(s - 1)] + hop(s);
    backward_tail_[at(s)] =
        first ? weight_[at(s)]
              : std::max(weight_[at(s)], hop(s) + backward_[at(s - 1)] + backward_tail_[at(s - 1)]);
  }
  for (int s = num_stages - 1; s >= 0; --s) {
    const bool last = placement.next(s) < 0;
    backward_head_[at(s)] = last ? forward_head_[at(s)] + forward_[at(s)]
                                 : backward_head_[at(s + 1)] + backward_[at(s + 1)] + hop(s + 1);
    forward_tail_[at(s)] = last ? backward_[at(s)] + backward_tail_[at(s)]
                                : hop(s + 1) + forward_[at(s + 1)] + forward_tail_[at(s + 1)];
  }
}

double ChainBounds::critical_path() const {
  double longest = 0.0;
  for (int s = 0; s < placement_.num_stages(); ++s) {
    longest = std::max(longest, forward_head_[at(s)] + forward_[at(s)] + forward_tail_[at(s)]);
  }
  return longest;
}

double ChainBounds::life(int stage) const {
  const size_t s = at(stage);
  return backward_head_[s] - forward_head_[s] + backward_[s] + weight_[s];
}

StageBounds ChainBounds::of_stage(int stage) const {
  const size_t s = at(stage);
  std::vector<Line> forward_heads = {{0.0, forward_head_[s]}};
  std::vector<Line> backward_heads = {{0.0, backward_head_[s]}};
  std::vector<Line> forward_tails = {{0.0, forward_tail_[s]}};
  std::vector<Line> backward_tails = {{0.0, backward_tail_[s]}};
  for (int rank = 0; rank < placement_.num_ranks(); ++rank) {
    const Stages stages = in_chain(rank, stage);
    if (stages.empty()) continue;
    add_head_lines(stage, stages, forward_heads, backward_heads);
    add_tail_lines(stage, stages, forward_tails, backward_tails);
  }
  const MicrobatchRange range = placement_.microbatches_of(stage, num_microbatches_);
  const int count = range.end - range.begin;
  StageBounds bounds{.forward_heads = evaluate(std::move(forward_heads), count),
                     .forward_tails = evaluate(std::move(forward_tails), count),
                     .backward_heads = evaluate(std::move(backward_heads), count),
                     .backward_tails = evaluate(std::move(backward_tails), count),
                     .weight_heads = {}};
  if (split_) {
    for (const double head : bounds.backward_heads) {
      bounds.weight_heads.push_back(head + backward_[s]);
    }
  }
  return bounds;
}

ChainBounds::Stages ChainBounds::in_chain(int rank, int stage) const {
  Stages stages;
  for (const int32_t s : placement_.stages_of(rank)) {
    if (placement_.chain_of(s) == placement_.chain_of(stage)) stages.push_back(s);
  }
  return stages;
}

// Sum over the stages in [begin, end).
double ChainBounds::sum(const std::vector<double>& costs,
                        const Stages& stages,
                        int begin,
                        int end) const {
  double total = 0.0;
  for (const int s : stages) {
    if (s >= begin && s < end) total += costs[at(s)];
  }
  return total;
}

// Shortest tail of a backward of the stages below `end`.
double ChainBounds::shortest_tail(const Stages& stages, int end) const {
  double shortest = std::numeric_limits<double>::infinity();
  for (const int s : stages) {
    if (s < end) shortest = std::min(shortest, backward_tail_[at(s)]);
  }
  return shortest;
}

// From the end of one action to the start of another of the same microbatch.
double ChainBounds::forward_to_forward(int from, int to) const {
  return forward_head_[at(to)] - forward_head_[at(from)] - forward_[at(from)];
}
double ChainBounds::forward_to_backward(int from, int to) const {
  return backward_head_[at(to)] - forward_head_[at(from)] - forward_[at(from)];
}
double ChainBounds::backward_to_backward(int from, int to) const {
  return backward_head_[at(to)] - backward_head_[at(from)] - backward_[at(from)];
}

// `stages` of one rank, ascending: what it must do before j+1 microbatches reach F or B of `stage`.
void ChainBounds::add_head_lines(int stage,
                                 const Stages& stages,
                                 std::vector<Line>& forward,
                                 std::vector<Line>& backward) const {
  const double start = forward_head_[at(stages.front())];
  const auto behind = std::upper_bound(stages.begin(), stages.end(), stage);
  const auto not_before = std::lower_bound(stages.begin(), stages.end(), stage);
  if (not_before != stages.begin()) {
    const double slope = sum(forward_, stages, 0, stage);
    forward.push_back({slope, start + forward_to_forward(*(not_before - 1), stage)});
  }
  const int end = stages.back() + 1;
  const double slope = sum(forward_, stages, 0, end) + sum(backward_, stages, stage + 1, end);
  const double way = behind != stages.end() ? backward_to_backward(*behind, stage)
                                            : forward_to_backward(stages.back(), stage);
  backward.push_back({slope, start + way});
}

// What the rank must still do after F or B of `stage` for that microbatch and j later ones.
void ChainBounds::add_tail_lines(int stage,
                                 const Stages& stages,
                                 std::vector<Line>& forward,
                                 std::vector<Line>& backward) const {
  const int end = stages.back() + 1;
  const auto behind = std::upper_bound(stages.begin(), stages.end(), stage);
  const double way = behind != stages.end() ? forward_to_forward(stage, *behind)
                                            : forward_to_backward(stage, stages.back());
  const double work = sum(forward_, stages, stage + 1, end) + sum(backward_, stages, 0, end);
  forward.push_back({work, way + shortest_tail(stages, end)});
  if (split_) forward.push_back({work + sum(weight_, stages, 0, end), way});

  const auto not_before = std::lower_bound(stages.begin(), stages.end(), stage);
  const bool own = not_before != stages.end() && *not_before == stage;
  const bool has_earlier = not_before != stages.begin();
  const double work_before = sum(backward_, stages, 0, stage);
  if (has_earlier) {
    const double way_back = backward_to_backward(stage, *(not_before - 1));
    backward.push_back({work_before, way_back + shortest_tail(stages, stage)});
    if (split_ && !own) {
      backward.push_back({work_before + sum(weight_, stages, 0, stage), way_back});
    }
  }
  if (split_ && own) backward.push_back({work_before + sum(weight_, stages, 0, stage + 1), 0.0});
}

// The maximum of the lines at 1, 2, .. count.
std::vector<double> ChainBounds::evaluate(std::vector<Line> lines, int count) {
  std::sort(lines.begin(), lines.end(), [](const Line& a, const Line& b) {
    return a.slope != b.slope ? a.slope < b.slope : a.at_zero < b.at_zero;
  });
  const auto value = [](const Line& line, int x) { return line.at_zero + line.slope * x; };
  // The next line of the upper envelope is steeper; it takes over where it is higher.
  std::vector<double> values(static_cast<size_t>(count), 0.0);
  std::vector<Line> envelope;
  for (const Line& line : lines) {
    // Lines that a steeper one beats from the start on never count again.
    while (!envelope.empty() && value(envelope.back(), 1) <= value(line, 1)) envelope.pop_back();
    envelope.push_back(line);
  }
  for (const Line& line : envelope) {
    for (int x = count; x >= 1; --x) {
      double& best = values[static_cast<size_t>(x - 1)];
      if (value(line, x) <= best) break;
      best = value(line, x);
    }
  }
  return values;
}

}  // namespace megacore::pipeline
