// Tracks complete buckets of gradients, whose reduce-scatter may start.
//
// A parameter may receive several gradients in the last backward pass (used by two model chunks,
// recomputed activations). Their number is learned: `expected(p)` is the maximum over all previous
// steps, and nothing launches before the end of the first step.
//
// Buckets always launch in order: a complete bucket waits for all earlier ones. So every rank
// issues the same collectives in the same order, independent of the order of gradients in its
// autograd engine, and even if some gradients are missing on one rank. Two kinds of buckets launch
// only at the end of the step, also in order: those flagged `waits` (their gradients need another
// sum first), which delay no other bucket, and those with a parameter that never received a
// gradient, since the next step might have one.
//
//   BucketTracker tracker({{1}, {0}});          // the last parameter is in the first bucket
//   tracker.start(); tracker.finish();          // -> {0, 1}; here: mark(1), mark(0) before finish
//   tracker.start(); tracker.mark(1);           // -> {0}
//   tracker.mark(0);                            // -> {1}

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace megacore::buffer {

class BucketTracker {
 public:
  // `buckets[b]`: parameters of bucket b. Parameters are numbered from 0; each is in one bucket,
  // and no bucket is empty.
  // `waits`: one flag per bucket, or empty for none.
  // Throws std::invalid_argument if a bucket is empty, a parameter is missing or repeated, or the
  // number of flags differs.
  explicit BucketTracker(std::vector<std::vector<int64_t>> buckets, std::vector<bool> waits = {});

  // Begins a step without gradients or launched buckets.
  void start();

  // Records a gradient of `param` in the last backward pass of its model chunk. Returns the buckets
  // to launch now, in order. Amortised O(1) per mark.
  // Throws std::invalid_argument if its bucket was already launched: the gradient would be lost.
  std::vector<int64_t> mark(int64_t param);

  // Ends the step: returns the remaining buckets, in order, those that wait last, and updates the
  // expected counts.
  std::vector<int64_t> finish();

  bool is_launched(int64_t param) const;

  // Number of gradients of `param` in this step, and the number that completes it (0: never).
  int64_t count(int64_t param) const { return params_[checked(param)].count; }
  int64_t expected(int64_t param) const { return params_[checked(param)].expected; }

  int64_t num_params() const { return static_cast<int64_t>(params_.size()); }

 private:
  struct Param {
    size_t bucket = 0;
    int64_t count = 0;
    int64_t expected = 0;
  };
  struct BucketState {
    std::vector<int64_t> params = {};
    bool waits = false;
    bool launched = false;
    size_t num_incomplete = 0;
  };

  size_t checked(int64_t param) const;
  void skip_waiting();

  std::vector<Param> params_ = {};
  std::vector<BucketState> buckets_ = {};
  size_t next_ = 0;  // first bucket that neither waits nor is launched
};

}  // namespace megacore::buffer
