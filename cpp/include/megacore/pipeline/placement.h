// Which pipeline rank runs which stage, and which stage follows which.
//
//   const Placement loop = Placement::loop({.num_ranks = 2, .num_chunks = 2});
//   loop.rank_of(2);     // 0: stages 0 1 2 3 live on ranks 0 1 0 1
//   loop.chunk_of(2);    // 1: the second model chunk of its rank
//   loop.next(3);        // -1: the last stage
//
// Any map from stage to rank is allowed, so the V placement (0 1 1 0) is a value like any other.
//
// A placement can hold several chains: copies of the model through which different microbatches
// flow. The stages of one chain are numbered in one run, then those of the next chain:
//
//   const Placement both = Placement::bidirectional({.num_ranks = 2});
//   both.rank_of(2);      // 1: stages 0 1 go down ranks 0 1, stages 2 3 go down ranks 1 0
//   both.chain_of(2);     // 1
//   both.next(1);         // -1: the last stage of chain 0

#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace megacore::pipeline {

struct MicrobatchRange {
  int begin;
  int end;
};

class Placement {
 public:
  struct LoopShape {
    int num_ranks;   // pipeline ranks
    int num_chunks;  // model chunks per rank
  };

  // Stage s on rank s mod num_ranks. REQUIRES: num_ranks >= 1, num_chunks >= 1.
  static Placement loop(const LoopShape& shape);

  struct RankShape {
    int num_ranks;
  };

  // Two stages per rank: down the ranks and back up, 0 1 .. p-1 p-1 .. 1 0. The first and the last
  // stage share rank 0. REQUIRES: num_ranks >= 1.
  static Placement v(const RankShape& shape);

  // Two chains of one stage per rank, in opposite directions: rank r holds stage r of the first
  // chain and stage num_ranks - 1 - r of the second. REQUIRES: num_ranks >= 1.
  static Placement bidirectional(const RankShape& shape);

  // stage_ranks[s] is the rank of stage s.
  // REQUIRES: at least one stage; the ranks are exactly 0 .. max, each with one stage or more;
  // num_chains >= 1 divides the number of stages.
  explicit Placement(std::vector<int32_t> stage_ranks, int num_chains = 1);

  int num_ranks() const { return static_cast<int>(rank_begin_.size()) - 1; }
  int num_stages() const { return static_cast<int>(stage_ranks_.size()); }
  // The largest number of model chunks on one rank.
  int num_chunks() const;

  int rank_of(int stage) const { return stage_ranks_[static_cast<size_t>(stage)]; }
  // Index of the stage among the stages of its rank, in stage order.
  int chunk_of(int stage) const { return stage_chunks_[static_cast<size_t>(stage)]; }
  // The stages of one rank in chunk order.
  std::span<const int32_t> stages_of(int rank) const;

  int num_chains() const { return num_stages() / chain_length_; }
  int chain_of(int stage) const { return stage / chain_length_; }

  // The microbatches that a stage runs, of `num_microbatches`: all with one chain; of n chains,
  // chain c runs [c num_microbatches / n, (c + 1) num_microbatches / n).
  MicrobatchRange microbatches_of(int stage, int num_microbatches) const {
    if (chain_length_ == num_stages()) return {0, num_microbatches};
    const auto cut = [&](int chain) {
      return static_cast<int>(static_cast<int64_t>(chain) * num_microbatches / num_chains());
    };
    return {cut(chain_of(stage)), cut(chain_of(stage) + 1)};
  }

  // The stage that reads this stage's output, or -1.
  int next(int stage) const { return (stage + 1) % chain_length_ != 0 ? stage + 1 : -1; }
  // The stage that makes this stage's input, or -1.
  int previous(int stage) const { return stage % chain_length_ != 0 ? stage - 1 : -1; }

  friend bool operator==(const Placement&, const Placement&) = default;

 private:
  std::vector<int32_t> stage_ranks_;   // [num_stages]
  std::vector<int32_t> stage_chunks_;  // [num_stages]
  std::vector<int32_t> rank_stages_;   // [num_stages], grouped by rank
  std::vector<int32_t> rank_begin_;    // [num_ranks + 1], into rank_stages_
  int chain_length_ = 1;               // stages per chain
};

}  // namespace megacore::pipeline
