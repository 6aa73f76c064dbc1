// Random numbers that are the same on every machine. Private.

#pragma once

#include <cstdint>

namespace megacore::pipeline {

// SplitMix64. Source: Steele et al., Fast splittable pseudorandom number generators, OOPSLA 2014.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  // Uniform enough in [0, count). REQUIRES: 1 <= count < 2^32.
  size_t below(size_t count) { return static_cast<size_t>(((next() >> 32) * count) >> 32); }
  bool coin() { return (next() & 1) != 0; }

 private:
  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15ULL;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }

  uint64_t state_;
};

}  // namespace megacore::pipeline
