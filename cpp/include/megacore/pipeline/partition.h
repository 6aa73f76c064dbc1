// Which layers live on which stage.
//
//   partition_layers({.num_layers = 8, .num_ranks = 2, .num_chunks = 2})
//     // stages 0..3: [0,2) [2,4) [4,6) [6,8); stage = chunk * num_ranks + rank
//   partition_layers({.num_layers = 6, .num_ranks = 4, .account_for_embedding = true,
//                     .account_for_loss = true})
//     // [0,1) [1,3) [3,5) [5,6): embedding and loss each count as one layer
//   partition_layers({.num_layers = 4, .num_ranks = 2, .layout = "Et|tttL"})
//     // [0,1) [1,4)

#pragma once

#include <optional>
#include <string>
#include <vector>

namespace megacore::pipeline {

struct PartitionShape {
  int num_layers;                      // >= 1
  int num_ranks;                       // pipeline ranks, >= 1
  int num_chunks = 1;                  // model chunks per rank, >= 1
  std::optional<int> first = {};       // layers of the first rank, over all its chunks
  std::optional<int> last = {};        // layers of the last rank, over all its chunks
  bool account_for_embedding = false;  // the embedding takes the place of a layer of stage 0
  bool account_for_loss = false;       // the head takes the place of a layer of the last stage
  // Ranks hold stages in a V: rank r has r and 2 num_ranks - 1 - r, and num_chunks is 2. It matters
  // to `first` and `last` only.
  bool is_v = false;
  // All stages, see layer_layout.h; instead of first, last and account_for_*.
  std::optional<std::string> layout = {};
};

struct LayerRange {
  int begin;
  int end;  // one past the last layer; equal to begin for a stage without layers

  friend bool operator==(const LayerRange&, const LayerRange&) = default;
};

// The layers of each stage, in stage order; together they are 0 .. num_layers - 1. Layers are
// spread evenly: over all stages, or, with `first` or `last`, over the stages of the other ranks;
// or as the layout says. Throws std::invalid_argument when that is not possible; the message says
// which rule fails and the nearest legal value of every setting that could be changed alone.
std::vector<LayerRange> partition_layers(const PartitionShape& shape);

}  // namespace megacore::pipeline
