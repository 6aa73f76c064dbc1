// Heads and tails of actions, from dependencies and from the work of other ranks. Private.
//
// The (j+1)-th forward of a stage, in order of time, cannot start before j+1 microbatches have
// passed everything ahead of it. For every rank that takes part in that: its first start, j+1 times
// its work, and the way from its last action to the stage. Tails follow in the same way.

#pragma once

#include <vector>

#include "megacore/pipeline/placement.h"
#include "stage_costs.h"

namespace megacore::pipeline {

// Ascending lists with one entry per microbatch of the stage. Entry j of the heads belongs to the
// action with j others of its kind and stage before it; of the tails, after it. Tails are counted
// from the end of the action. Backward means B, or I when it is split.
struct StageBounds {
  std::vector<double> forward_heads;
  std::vector<double> forward_tails;
  std::vector<double> backward_heads;
  std::vector<double> backward_tails;
  std::vector<double> weight_heads;  // of W that runs apart, else empty
};

class ChainBounds {
 public:
  ChainBounds(const Placement& placement,
              const StageCosts& costs,
              int num_microbatches,
              bool split_backward);

  StageBounds of_stage(int stage) const;

  double head(int stage) const { return forward_head_[at(stage)]; }
  double tail(int stage) const { return backward_tail_[at(stage)]; }
  // One microbatch through all stages and back, with the last weight gradient.
  double critical_path() const;
  // Shortest time from the start of F to the release of its activation.
  double life(int stage) const;
  double forward(int stage) const { return forward_[at(stage)]; }
  // Duration of B, or of I.
  double backward(int stage) const { return backward_[at(stage)]; }
  // Duration of W that runs apart; 0 when it does not.
  double weight(int stage) const { return weight_[at(stage)]; }

 private:
  // A bound that grows by `slope` with every microbatch.
  struct Line {
    double slope;
    double at_zero;
  };
  // The stages of one rank in the chain of another stage.
  using Stages = std::vector<int>;

  static size_t at(int stage) { return static_cast<size_t>(stage); }
  Stages in_chain(int rank, int stage) const;
  double sum(const std::vector<double>& costs, const Stages& stages, int begin, int end) const;
  double shortest_tail(const Stages& stages, int end) const;
  double forward_to_forward(int from, int to) const;
  double forward_to_backward(int from, int to) const;
  double backward_to_backward(int from, int to) const;
  void add_head_lines(int stage,
                      const Stages& stages,
                      std::vector<Line>& forward,
                      std::vector<Line>& backward) const;
  void add_tail_lines(int stage,
                      const Stages& stages,
                      std::vector<Line>& forward,
                      std::vector<Line>& backward) const;
  static std::vector<double> evaluate(std::vector<Line> lines, int count);

  const Placement& placement_;
  int num_microbatches_;
  bool split_;
  std::vector<double> forward_;   // duration of F by stage
  std::vector<double> backward_;  // of B or I
  std::vector<double> weight_;    // of W apart, else 0
  std::vector<double> forward_head_;
  std::vector<double> backward_head_;
  std::vector<double> forward_tail_;
  std::vector<double> backward_tail_;
};

}  // namespace megacore::pipeline
