// Activations that forwards do not keep and that are made again before their backward.
//
//   Program program = add_recompute(lower(schedule)[0], {.keep = 1});
//
// validate_programs() proves the result.

#pragma once

#include "megacore/pipeline/program/lowering.h"

namespace megacore::pipeline {

// Which microbatches keep their activations: of every `window` forwards of a rank, in its order,
// the first `keep`; the others are recomputed. A window of 0 is the largest number of activations
// that the rank holds at once, so that with `keep` as large nothing is recomputed.
struct Recompute {
  int keep = 0;
  int window = 0;
};

// RECOMPUTE stands before the first backward that reads the activations. Forwards that keep none
// are marked. A forward-only program stays as it is. O(steps). Throws std::invalid_argument for a
// negative `keep` or `window`.
Program add_recompute(Program program, const Recompute& recompute);

}  // namespace megacore::pipeline
