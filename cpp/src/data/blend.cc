#include "megacore/data/blend.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "megacore/base/check.h"
#include "megacore/base/vector_clones.h"

namespace megacore::data {
namespace {

using Four [[gnu::vector_size(4 * sizeof(double))]] = double;
constexpr size_t kVectors = 4;  // at a time, so that their latencies overlap
constexpr size_t kStride = 4 * kVectors;

// Index of the first largest weight * at - taken; `size` is a multiple of kStride.
MC_VECTOR_CLONES size_t furthest_behind(const double* weights,
                                        const double* taken,
                                        size_t size,
                                        double at) {
  constexpr double kLeast = -std::numeric_limits<double>::infinity();
  Four largest[kVectors];
  for (Four& each : largest) {
    each = Four{kLeast, kLeast, kLeast, kLeast};
  }
  for (size_t i = 0; i < size; i += kStride) {
    for (size_t vector = 0; vector < kVectors; ++vector) {
      Four weight;
      Four count;
      __builtin_memcpy(&weight, weights + i + 4 * vector, sizeof(weight));
      __builtin_memcpy(&count, taken + i + 4 * vector, sizeof(count));
      const Four behind = weight * at - count;
      largest[vector] = behind > largest[vector] ? behind : largest[vector];
    }
  }
  double found = kLeast;
  for (const Four& each : largest) {
    found = std::max({found, each[0], each[1], each[2], each[3]});
  }
  size_t i = 0;
  while (weights[i] * at - taken[i] != found) {
    ++i;
  }
  return i;
}

}  // namespace

BlendOrder::BlendOrder(std::span<const double> weights)
    : num_datasets_(weights.size()), weights_(weights.begin(), weights.end()) {
  MC_REQUIRE(!weights.empty() && weights.size() <= std::numeric_limits<int16_t>::max(),
             "a blend must have 1 to {} datasets, got {}", std::numeric_limits<int16_t>::max(),
             weights.size());
  MC_REQUIRE(std::ranges::all_of(weights, [](double weight) { return std::isfinite(weight); }),
             "weights must be finite");
  weights_.resize((weights.size() + kStride - 1) / kStride * kStride,
                  -std::numeric_limits<double>::infinity());
  taken_.resize(weights_.size(), 0.0);
}

void BlendOrder::take(std::span<int16_t> datasets, std::span<int64_t> numbers) {
  MC_REQUIRE(datasets.size() == numbers.size(), "got {} datasets and {} numbers", datasets.size(),
             numbers.size());
  for (size_t i = 0; i < datasets.size(); ++i, ++next_) {
    const auto at = static_cast<double>(std::max(next_, int64_t{1}));
    const size_t chosen = furthest_behind(weights_.data(), taken_.data(), weights_.size(), at);
    datasets[i] = static_cast<int16_t>(chosen);
    numbers[i] = static_cast<int64_t>(taken_[chosen]);
    taken_[chosen] += 1.0;
  }
}

}  // namespace megacore::data
