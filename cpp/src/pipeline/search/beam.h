// A beam search over partial schedules, guided by when each action is due. Private.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "search/instance.h"

namespace megacore::pipeline {

// A time for the start of the k-th F and of the k-th B or I of a stage: [stage * m + k].
struct DueTimes {
  std::vector<double> forward;
  std::vector<double> backward;
};

struct BeamSearch {
  size_t width;    // partial schedules to keep
  double pull;     // what being late counts, next to the gaps of ranks
  double give_up;  // only makespans below count
};

struct BeamResult {
  std::optional<Orders> orders = {};
  double makespan = kNever;
  int64_t num_scheduled = 0;
};

// Adds one action at a time to all partial schedules that it keeps: each goes on in every way in
// which no rank leaves a gap that the action could fill, and of the results those are kept that
// promise the earliest end. With e(r) when rank r can end with no further gap, and late(r) by how
// much its latest action to come starts after it is due, the smallest
//
//   sum over ranks of (e(r) + pull late(r)) / p  +  max over ranks of late(r)
//
// come first; of those that have run the same actions two are kept at most.
// Source: ways to go on from Giffler and Thompson, Operations Research 8 (1960); the beam from Ow
// and Morton, International Journal of Production Research 26 (1988).
// REQUIRES: every rank has room for one activation of each of its stages.
BeamResult search_beam(const Instance& instance, const DueTimes& due, const BeamSearch& search);

}  // namespace megacore::pipeline
