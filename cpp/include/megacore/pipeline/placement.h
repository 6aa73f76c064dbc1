// Which pipeline rank runs which stage, and which stage follows which.
//
//   const Placement loop = Placement::loop({.num_ranks = 2, .num_chunks = 2});
//   loop.rank_of(2);     // 0: stages 0 1 2 3 live on ranks 0 1 0 1
//   loop.chunk_of(2);    // 1: the second model chunk of its rank
//   loop.next(3);        // -1: the last stage
//
// Any map from stage to rank is allowed, so the V placement (0 1 1 0) is a value like any other.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace megacore::pipeline {

class Placement {
 public:
  struct LoopShape {
    int num_ranks;   // pipeline ranks
    int num_chunks;  // model chunks per rank
  };

  // Stage s on rank s mod num_ranks. REQUIRES: num_ranks >= 1, num_chunks >= 1.
  static Placement loop(const LoopShape& shape);

  // stage_ranks[s] is the rank of stage s.
  // REQUIRES: at least one stage; the ranks are exactly 0 .. max, each with one stage or more.
  explicit Placement(std::vector<int32_t> stage_ranks);

  int num_ranks() const { return static_cast<int>(rank_begin_.size()) - 1; }
  int num_stages() const { return static_cast<int>(stage_ranks_.size()); }
  // The largest number of model chunks on one rank.
  int num_chunks() const;

  int rank_of(int stage) const { return stage_ranks_[static_cast<size_t>(stage)]; }
  // Index of the stage among the stages of its rank, in stage order.
  int chunk_of(int stage) const { return stage_chunks_[static_cast<size_t>(stage)]; }
  // The stages of one rank in chunk order.
  std::span<const int32_t> stages_of(int rank) const;

  // The stage that reads this stage's output, or -1.
  int next(int stage) const { return stage + 1 < num_stages() ? stage + 1 : -1; }
  // The stage that makes this stage's input, or -1.
  int previous(int stage) const { return stage - 1; }

  friend bool operator==(const Placement&, const Placement&) = default;

 private:
  std::vector<int32_t> stage_ranks_;   // [num_stages]
  std::vector<int32_t> stage_chunks_;  // [num_stages]
  std::vector<int32_t> rank_stages_;   // [num_stages], grouped by rank
  std::vector<int32_t> rank_begin_;    // [num_ranks + 1], into rank_stages_
};

}  // namespace megacore::pipeline
