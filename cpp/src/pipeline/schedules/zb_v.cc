#include <algorithm>

#include "schedules/generate.h"

namespace megacore::pipeline {
namespace {

// Appends actions of one rank, counting the microbatches of each stage and kind; those beyond the
// schedule's own are left out.
class VRank {
 public:
  VRank(int rank, int num_ranks, int num_microbatches, std::vector<Action>& actions)
      : stages_{rank, 2 * num_ranks - 1 - rank},
        num_microbatches_(num_microbatches),
        actions_(actions) {}

  void forward(size_t chunk) { add(chunk, ActionKind::kForward, forwards_[chunk]++); }
  void input(size_t chunk) { add(chunk, ActionKind::kBackwardInput, inputs_[chunk]++); }
  void weight(size_t chunk) { add(chunk, ActionKind::kBackwardWeight, weights_[chunk]++); }
  void backward(size_t chunk) {
    input(chunk);
    weight(chunk);
  }
  // All weight gradients whose input gradient is there.
  void rest_of_weights(size_t chunk) {
    while (weights_[chunk] < inputs_[chunk]) weight(chunk);
  }
  int num_forwards(size_t chunk) const { return forwards_[chunk]; }

 private:
  void add(size_t chunk, ActionKind kind, int microbatch) {
    if (microbatch < num_microbatches_) actions_.push_back({stages_[chunk], kind, microbatch});
  }

  int stages_[2];
  int num_microbatches_;
  std::vector<Action>& actions_;
  int forwards_[2] = {0, 0};
  int inputs_[2] = {0, 0};
  int weights_[2] = {0, 0};
};

}  // namespace

Schedule zb_v(const PipelineShape& shape) {
  const int p = shape.num_ranks;
  require_v_ranks(p);
  require_sizes(p, 2, shape.num_microbatches, 3);
  // As many microbatches as fill the pipeline; surplus ones are left out.
  const int m = std::max(shape.num_microbatches, 2 * p - 1);
  return make_schedule("zb_v", Placement::v({.num_ranks = p}), shape.num_microbatches, 3,
                       [&](int rank, std::vector<Action>& actions) {
                         VRank v(rank, p, shape.num_microbatches, actions);
                         for (int i = 0; i < 2 * (p - rank) - 1; ++i) v.forward(0);
                         for (int i = 0; i < rank; ++i) {
                           v.forward(1);
                           v.forward(0);
                         }
                         for (int i = 0; i < p - rank; ++i) {
                           v.forward(1);
                           v.backward(1);
                         }
                         while (v.num_forwards(1) < m) {
                           if (v.num_forwards(0) < m) v.forward(0);
                           v.backward(0);
                           v.forward(1);
                           v.backward(1);
                         }
                         for (int i = 0; i < rank; ++i) {
                           v.input(0);
                           v.input(1);
                         }
                         for (int i = 0; i < p - rank; ++i) v.backward(0);
                         v.rest_of_weights(1);
                         v.rest_of_weights(0);
                       });
}

}  // namespace megacore::pipeline
