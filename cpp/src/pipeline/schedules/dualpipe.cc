// DualPipe and DualPipeV: forwards of one stage of a rank overlap with backwards of the other.

#include <array>

#include "schedules/generate.h"

namespace megacore::pipeline {
namespace {

// Where a rank stands: `distance` from the rank at which stage 0 of its two stages begins, in a
// pipeline of `depth` ranks.
struct DualRank {
  int depth;
  int distance;
  std::array<int, 2> stages;
  std::array<int, 2> first_microbatch;
  int num_microbatches;  // of each stage
};

// Appends the actions of one rank, counting the microbatches of each stage and kind. The weight
// gradients of split backwards wait in one queue.
class DualOrder {
 public:
  DualOrder(const DualRank& rank, std::vector<Action>& actions, std::vector<int64_t>& overlaps)
      : rank_(rank), actions_(actions), overlaps_(overlaps) {}

  void append() {
    const int before = rank_.distance + 1;
    const int after = rank_.depth - before;
    for (int i = 0; i < 2 * after; ++i) forward(0);
    for (int i = 0; i < before; ++i) {
      forward(0);
      forward(1);
    }
    for (int i = 0; i < after; ++i) {
      input(1);
      weight();
      forward(1);
    }
    append_steady(rank_.num_microbatches - 2 * rank_.depth + before, after == 0);
    for (int i = 0; i < after; ++i) {
      backward(1);
      forward_with_backward(1, 0);
    }
    append_cooldown(before, after);
  }

 private:
  void append_steady(int num_rounds, bool is_last_rank) {
    for (int i = 0; i < num_rounds; ++i) {
      if (i == 0 && is_last_rank) {
        // One after the other: the backward would only wait for the forward's end.
        forward(0);
        backward(1);
      } else {
        forward_with_backward(0, 1);
      }
      forward_with_backward(1, 0);
    }
  }

  // Backwards only. From the middle on they are split, so that gradients leave early and the weight
  // gradients fill the wait for the last ones.
  void append_cooldown(int before, int after) {
    const int middle = before / 2;
    const bool odd = rank_.distance % 2 == 1;
    for (int i = 0; i < before; ++i) {
      i > middle || (i == middle && odd) ? input(1) : backward(1);
      i >= middle ? input(0) : backward(0);
    }
    for (int i = 0; i < after; ++i) {
      weight();
      input(0);
    }
    while (num_weights_ < waiting_weights_.size()) weight();
  }

  void add(size_t chunk, ActionKind kind, int count) {
    actions_.push_back({rank_.stages[chunk], kind, rank_.first_microbatch[chunk] + count});
  }
  void forward(size_t chunk) { add(chunk, ActionKind::kForward, num_forwards_[chunk]++); }
  void backward(size_t chunk) { add(chunk, ActionKind::kBackward, num_backwards_[chunk]++); }
  void input(size_t chunk) {
    add(chunk, ActionKind::kBackwardInput, num_backwards_[chunk]++);
    waiting_weights_.push_back(actions_.back());
  }
  void weight() {
    if (num_weights_ == waiting_weights_.size()) return;
    actions_.push_back(waiting_weights_[num_weights_++]);
    actions_.back().kind = ActionKind::kBackwardWeight;
  }
  void forward_with_backward(size_t forward_chunk, size_t backward_chunk) {
    overlaps_.push_back(static_cast<int64_t>(actions_.size()));
    forward(forward_chunk);
    backward(backward_chunk);
  }

  const DualRank& rank_;
  std::vector<Action>& actions_;
  std::vector<int64_t>& overlaps_;
  std::array<int, 2> num_forwards_ = {0, 0};
  std::array<int, 2> num_backwards_ = {0, 0};
  std::vector<Action> waiting_weights_;
  size_t num_weights_ = 0;
};

template <typename RankOf>
Schedule build(std::string name, Placement placement, int num_microbatches, const RankOf& rank_of) {
  std::vector<int64_t> overlaps;
  Schedule schedule = make_schedule(std::move(name), std::move(placement), num_microbatches, 3,
                                    [&](int rank, std::vector<Action>& actions) {
                                      DualOrder(rank_of(rank), actions, overlaps).append();
                                    });
  schedule.overlaps = std::move(overlaps);
  return schedule;
}

constexpr int kPerRank = 2;  // microbatches at least

void require_enough(const char* name, int num_ranks, int num_microbatches) {
  MC_REQUIRE(num_microbatches >= kPerRank * int64_t{num_ranks},
             "num_microbatches is {}; {} needs at least {} per rank: {}", num_microbatches, name,
             kPerRank, kPerRank * int64_t{num_ranks});
}

}  // namespace

Schedule dualpipe_v(const PipelineShape& shape) {
  const auto [p, m] = shape;
  require_sizes(p, 2, m, 3, kPerRank);
  require_enough("dualpipe_v", p, m);
  return build("dualpipe_v", Placement::v({.num_ranks = p}), m, [&](int rank) {
    return DualRank{.depth = shape.num_ranks,
                    .distance = rank,
                    .stages = {rank, 2 * shape.num_ranks - 1 - rank},
                    .first_microbatch = {0, 0},
                    .num_microbatches = shape.num_microbatches};
  });
}

Schedule dualpipe(const PipelineShape& shape) {
  const auto [p, m] = shape;
  require_sizes(p, 2, m, 3, kPerRank);
  MC_REQUIRE(p % 2 == 0,
             "num_ranks is {}; dualpipe needs an even number, for example {}, or use dualpipe_v", p,
             p + 1);
  require_enough("dualpipe", p, m);
  MC_REQUIRE(m % 2 == 0,
             "num_microbatches is {}; dualpipe sends one half in each direction: use {} or {}", m,
             m - 1, m + 1);
  return build("dualpipe", Placement::bidirectional({.num_ranks = p}), m, [&](int rank) {
    // The stage of the chain that enters at the near end comes first.
    const int far = shape.num_ranks - 1 - rank;
    const int half = shape.num_microbatches / 2;
    const bool near_start = rank < far;
    const int first_stage = rank;
    const int second_stage = shape.num_ranks + far;
    return DualRank{.depth = shape.num_ranks / 2,
                    .distance = near_start ? rank : far,
                    .stages = near_start ? std::array{first_stage, second_stage}
                                         : std::array{second_stage, first_stage},
                    .first_microbatch = near_start ? std::array{0, half} : std::array{half, 0},
                    .num_microbatches = half};
  });
}

}  // namespace megacore::pipeline
