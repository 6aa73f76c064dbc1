// Normally distributed numbers by their index in a stream: the same on every processor, for every
// number of threads and wherever a stretch begins.

#pragma once

#include <cstdint>

namespace megacore::base {

// Stretches of a stream, one after the other: stretch i has the numbers from first + i * stride.
struct NormalStretches {
  int64_t count;
  int64_t length;
  int64_t first;
  int64_t stride;
};

// Writes count x length numbers with mean 0 and the standard deviation. Numbers 2p and 2p + 1 are
// the two results of a Box-Muller transform of the p-th number of SplitMix64 from the key: 24 bits
// give the radius, of at most 5.77 standard deviations, and 32 bits the angle.
// Source: Box, Muller, A note on the generation of random normal deviates, 1958
// (doi:10.1214/aoms/1177706645); polynomials of the Cephes library for logarithm, sine and cosine.
void fill_normal(float* out,
                 const NormalStretches& stretches,
                 uint64_t key,
                 float standard_deviation,
                 int num_threads);

}  // namespace megacore::base
