// The order of the samples of a blend of datasets, as Megatron's BlendedDataset has it.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace megacore::data {

// Takes each sample from the dataset that is furthest behind its weight, the first of several:
// the one with the largest weight * max(n, 1) - samples taken, in float64, for sample n.
// Source: docs/data.md; compared with megatron-core 0.19.2.
class BlendOrder {
 public:
  // REQUIRES: 1 to 32,767 finite weights.
  explicit BlendOrder(std::span<const double> weights);

  // Writes dataset and number in it of the next samples. O(samples * datasets).
  // REQUIRES: the spans have equal sizes.
  void take(std::span<int16_t> datasets, std::span<int64_t> numbers);

  // Samples taken of a dataset so far.
  [[nodiscard]] int64_t count(size_t dataset) const {
    return static_cast<int64_t>(taken_[dataset]);
  }
  [[nodiscard]] size_t num_datasets() const { return num_datasets_; }

 private:
  size_t num_datasets_;
  // Filled up to whole vectors with datasets that are never behind.
  std::vector<double> weights_;
  std::vector<double> taken_;
  int64_t next_ = 0;
};

}  // namespace megacore::data
