// Layout of parameters in one contiguous buffer, and the ranges of its collectives.
//
// A buffer has all parameters (or their gradients) of one kind in sequence. It is split into
// buckets:
// the unit of one reduce-scatter and one all-gather. All numbers are elements, not bytes, so the
// same plan applies to the parameter buffer and the gradient buffer.
//
// Layout rules:
//   1. Parameters are placed in reverse order: the backward pass finishes the last one first, so
//      the first bucket is the first whose gradients are complete.
//   2. A parameter starts at a multiple of `param_alignment` (aligned views for vector kernels).
//   3. A bucket closes as soon as it spans `bucket_numel` elements, counted from its start.
//   4. A shared parameter (tied embeddings) is alone in its bucket: it closes the open bucket and
//      then its own. Its gradient can be exchanged between stages without touching others.
//   5. The end of a bucket is padded to a multiple of `bucket_alignment`, so that every
//      data-parallel rank owns an equal slice of it, and with `pad_for_ring` to one of 2^16.
// Buckets tile the buffer; elements between parameters are padding and stay zero.
//
//   plan_buckets({.numels = {8, 5, 3}, .dp_size = 4, .param_alignment = 1, .bucket_alignment = 4})
//     parameter 2 -> [0, 3)   parameter 1 -> [3, 8)   parameter 0 -> [8, 16)

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace megacore::buffer {

// A half-open range of elements, [start, end).
struct Range {
  int64_t start = 0;
  int64_t end = 0;

  int64_t numel() const { return end - start; }
  friend bool operator==(const Range&, const Range&) = default;
};

struct BucketPlanSpec {
  // Elements of each parameter, in forward (registration) order; each >= 0.
  std::vector<int64_t> numels = {};
  // Ranks that shard the buffer; each owns 1/dp_size of every bucket.
  int64_t dp_size = 1;
  // A bucket closes when it spans this many elements. Default: default_bucket_numel(dp_size).
  std::optional<int64_t> bucket_numel = std::nullopt;
  // Parameters that must be alone in a bucket. Empty, or one flag per parameter.
  std::vector<bool> shared = {};
  // Parameters start at multiples of this.
  int64_t param_alignment = 64;
  // Buckets end at multiples of this; a multiple of dp_size. Default: lcm(dp_size, 128).
  std::optional<int64_t> bucket_alignment = std::nullopt;
  // Also pad bucket ends to a multiple of 2^16: the messages of a ring then are multiples of a
  // large power of two, which is faster on some networks.
  bool pad_for_ring = false;
};

struct Bucket {
  int64_t start = 0;
  int64_t end = 0;             // start of the next bucket; padding included
  int64_t numel_unpadded = 0;  // from `start` to the end of the last parameter; gaps included
  std::vector<int64_t> param_indices = {};  // in layout order, that is descending

  int64_t numel() const { return end - start; }
  friend bool operator==(const Bucket&, const Bucket&) = default;
};

struct BufferPlan {
  int64_t numel = 0;  // elements of the whole buffer, padding included
  int64_t dp_size = 1;
  int64_t bucket_numel = 1;
  int64_t param_alignment = 1;
  int64_t bucket_alignment = 1;
  std::vector<Range> param_ranges = {};  // by parameter index, in buffer coordinates
  std::vector<Bucket> buckets = {};      // by start

  // Range of parameter `index`. Throws std::out_of_range.
  const Range& param_range(int64_t index) const;

  // Elements that one rank owns: numel / dp_size.
  int64_t shard_numel() const { return numel / dp_size; }

  friend bool operator==(const BufferPlan&, const BufferPlan&) = default;
};

// max(40M, 1M * dp_size): a ring of many ranks needs larger buckets for full bandwidth.
// REQUIRES: dp_size >= 1.
int64_t default_bucket_numel(int64_t dp_size);

// Computes the layout by the rules above. O(number of parameters); the same on every rank.
// Throws std::invalid_argument for a size that is not positive, a negative parameter size, flags of
// another length, a bucket_alignment that dp_size does not divide, or a buffer beyond 2^60.
BufferPlan plan_buckets(const BucketPlanSpec& spec);

// One line for the buffer, one per bucket, one per parameter, in layout order.
std::string to_text(const BufferPlan& plan);

}  // namespace megacore::buffer
