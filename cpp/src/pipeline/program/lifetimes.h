// When the buffers of one rank's program are free again. Private.

#pragma once

#include <cstdint>
#include <vector>

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

// True for the last compute action that reads the activations of its pair.
inline bool reads_activation_last(const Action& action, bool forward_only) {
  return forward_only ? action.kind == ActionKind::kForward : frees_activation(action.kind);
}

// True for the step after which the slot of the pair is free.
inline bool frees_slot(const Action& action, const Program& program) {
  return program.passes.releases ? action.kind == ActionKind::kRelease
                                 : reads_activation_last(action, program.forward_only);
}

// The pool of a stage's slots.
inline size_t pool_of(const Program& program, int stage, SlotPools pools) {
  return pools == SlotPools::kPerChunk ? static_cast<size_t>(program.placement.chunk_of(stage)) : 0;
}

inline size_t num_pools(const Program& program, SlotPools pools) {
  return pools == SlotPools::kPerChunk ? program.placement.stages_of(program.rank).size() : 1;
}

}  // namespace megacore::pipeline
