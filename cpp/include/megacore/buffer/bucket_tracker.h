// When the gradients of a bucket are complete, so that its reduce-scatter may start.
//
// A parameter may receive several gradients in the last backward pass (used by two model chunks,
// recomputed activations). How many is learnt: `expected(p)` is the largest number that any step
// before has seen, and nothing launches before the first step has ended.
//
// Buckets launch in their own order, always: a bucket that is complete waits for those before it.
// So every rank issues the same collectives in the same order, whatever the order in which its
// autograd engine delivers gradients, and even if one rank lacks some. Two kinds of buckets launch
// only when the step ends, also in order: those flagged `waits` (their gradients need another sum
// first), which hold up nobody, and those with a parameter that no step has ever given a gradient,
// since the next step might.
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
  // Throws std::invalid_argument if a bucket is empty, a parameter is missing or repeated, or
  // the flags do not fit.
  explicit BucketTracker(std::vector<std::vector<int64_t>> buckets, std::vector<bool> waits = {});

  // Begins a step: no gradient yet, nothing launched.
  void start();

  // Parameter `param` received a gradient in the last backward pass of its model chunk. Returns the
  // buckets to launch now, in order. Amortised O(1) per mark.
  // Throws std::invalid_argument if its bucket was launched already: that gradient would be lost.
  std::vector<int64_t> mark(int64_t param);

  // Ends the step: returns the buckets not launched yet, in order, those that wait last, and learns
  // the counts.
  std::vector<int64_t> finish();

  bool is_launched(int64_t param) const;

  // Gradients that `param` received in this step and the number that makes it complete (0: never).
  int64_t count(int64_t param) const { return params_[checked(param)].count; }
  int64_t expected(int64_t param) const { return params_[checked(param)].expected; }

  int64_t num_params() const { return static_cast<int64_t>(params_.size()); }
  int64_t num_buckets() const { return static_cast<int64_t>(buckets_.size()); }

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
