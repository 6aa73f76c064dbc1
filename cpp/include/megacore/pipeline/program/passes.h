// Passes over the program of one rank: each takes a program and returns another, in linear time.
//
//   Program program = lower(schedule)[0];
//   program = add_recompute(std::move(program), {.keep = 1});
//   program = add_parameter_sync(std::move(program));
//   program = add_releases(std::move(program));
//   program = assign_slots(std::move(program), SlotPools::kPerChunk);
//   to_text(program, ProgramLevel::kResources);
//
// `lower(schedule, options)` runs them in that order for all ranks. What a pass adds is proved by
// validate_programs().

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "megacore/pipeline/program/lowering.h"

namespace megacore::pipeline {

// Which microbatches keep their activations: of every `window` forwards of a rank, in its order,
// the first `keep`; the others are recomputed. A window of 0 is the largest number of activations
// that the rank holds at once, so that with `keep` as large nothing is recomputed.
struct Recompute {
  int keep = 0;
  int window = 0;
};

// GATHER_PARAMS of a stage stands before the compute action that precedes its first forward,
// REDUCE_GRADS behind its last backward and the sends that follow that.
Program add_parameter_sync(Program program);

// RECOMPUTE stands before the first backward that reads the activations. Forwards that keep none
// are marked. A forward-only program stays as it is. Throws std::invalid_argument for a negative
// `keep` or `window`.
Program add_recompute(Program program, const Recompute& recompute);

// RELEASE stands behind the last action that reads the activations: B, or W of a split backward, or
// F in a forward-only program; and the sends that follow that.
Program add_releases(Program program);

// Sends and receives with no compute action between them are posted together. Throws
// std::invalid_argument for a program whose receives are ahead: a compute action waits for a whole
// batch, which is only safe if all transfers follow one order.
Program batch_transfers(Program program);

// Numbers the buffers that a rank needs if it never allocates one while it runs.
//
// A slot holds the input and the saved activations of one (stage, microbatch) from F until its
// release. Receives have slots of their own: that of an activation is free again after F, which
// takes it over, that of a gradient after B, or after W of a split backward. A slot is taken again
// in the order in which slots become free; a new one is only added when none is free. So there are
// as many as are in use at once, whatever the number of microbatches, and with kPerChunk a chunk
// goes round its slots in a ring when it frees them in order. The last pass: what is inserted
// later has no slot.
Program assign_slots(Program program, SlotPools pools);

struct SlotCounts {
  std::vector<int32_t> activations;  // [pools] one pool per chunk of the rank, or one in all
  std::vector<int32_t> inputs;       // [pools] receive buffers for activations
  std::vector<int32_t> gradients;    // [pools] receive buffers for gradients
  // Pairs of a forward and a backward that capture as CUDA graphs needs: one for each slot and
  // chunk that come together.
  int32_t graph_pairs;
};

// REQUIRES: assign_slots() was the last pass.
SlotCounts count_slots(const Program& program);

struct LoweringOptions {
  Receives receives = Receives::kAhead;
  int ahead = 1;
  std::optional<Recompute> recompute = std::nullopt;
  bool parameter_sync = true;
  bool releases = true;
  bool batches = false;  // needs Receives::kInOrder
  std::optional<SlotPools> slots = SlotPools::kPerChunk;
};

// lower() and the passes that the options ask for, for all ranks.
// REQUIRES: validate(schedule) passes.
std::vector<Program> lower(const Schedule& schedule, const LoweringOptions& options);

}  // namespace megacore::pipeline
