// Indices for what belongs to one stage and microbatch of a rank. Private.

#pragma once

#include <cstddef>

#include "megacore/pipeline/program/lowering.h"

namespace megacore::pipeline {

// Numbers the (chunk, microbatch) pairs of one rank.
class PairIndex {
 public:
  explicit PairIndex(const Program& program)
      : placement_(&program.placement),
        num_microbatches_(static_cast<size_t>(program.num_microbatches)),
        size_(program.placement.stages_of(program.rank).size() * num_microbatches_) {}

  size_t size() const { return size_; }
  size_t of(const Action& action) const {
    return static_cast<size_t>(placement_->chunk_of(action.stage)) * num_microbatches_ +
           static_cast<size_t>(action.microbatch);
  }

 private:
  const Placement* placement_;
  size_t num_microbatches_;
  size_t size_;
};

}  // namespace megacore::pipeline
