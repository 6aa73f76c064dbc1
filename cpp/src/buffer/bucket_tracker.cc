#include "megacore/buffer/bucket_tracker.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "megacore/base/check.h"

namespace megacore::buffer {

BucketTracker::BucketTracker(std::vector<std::vector<int64_t>> buckets, std::vector<bool> waits) {
  MC_REQUIRE(waits.empty() || waits.size() == buckets.size(),
             "there are {} flags for {} buckets; give one flag per bucket, or none", waits.size(),
             buckets.size());
  size_t num_params = 0;
  for (const auto& bucket : buckets) {
    num_params += bucket.size();
  }
  params_.resize(num_params);
  std::vector<bool> seen(num_params, false);
  for (size_t b = 0; b < buckets.size(); ++b) {
    MC_REQUIRE(!buckets[b].empty(), "bucket {} holds no parameter", b);
    for (const int64_t param : buckets[b]) {
      MC_REQUIRE(param >= 0 && static_cast<size_t>(param) < num_params,
                 "bucket {} holds parameter {}, but there are {} parameters, numbered from 0", b,
                 param, num_params);
      MC_REQUIRE(!seen[static_cast<size_t>(param)], "parameter {} is in two buckets", param);
      seen[static_cast<size_t>(param)] = true;
      params_[static_cast<size_t>(param)].bucket = b;
    }
    buckets_.push_back(
        {.params = std::move(buckets[b]), .waits = !waits.empty() && waits[b], .launched = false});
  }
  start();
}

void BucketTracker::start() {
  for (Param& param : params_) {
    param.count = 0;
  }
  for (BucketState& bucket : buckets_) {
    bucket.launched = false;
    bucket.num_incomplete = bucket.params.size();
  }
  next_ = 0;
  skip_waiting();
}

std::vector<int64_t> BucketTracker::mark(int64_t param) {
  Param& state = params_[checked(param)];
  BucketState& bucket = buckets_[state.bucket];
  MC_REQUIRE(!bucket.launched,
             "parameter {} receives gradient number {} of a step, but its bucket was reduced after "
             "the {} that earlier steps had",
             param, state.count + 1, state.expected);
  ++state.count;
  if (state.count == state.expected) {
    --bucket.num_incomplete;
  }
  std::vector<int64_t> ready;
  while (next_ < buckets_.size() && buckets_[next_].num_incomplete == 0) {
    buckets_[next_].launched = true;
    ready.push_back(static_cast<int64_t>(next_++));
    skip_waiting();
  }
  return ready;
}

std::vector<int64_t> BucketTracker::finish() {
  std::vector<int64_t> rest;
  for (const bool waiting : {false, true}) {
    for (size_t b = 0; b < buckets_.size(); ++b) {
      if (!buckets_[b].launched && buckets_[b].waits == waiting) {
        buckets_[b].launched = true;
        rest.push_back(static_cast<int64_t>(b));
      }
    }
  }
  next_ = buckets_.size();
  for (Param& param : params_) {
    param.expected = std::max(param.expected, param.count);
  }
  return rest;
}

bool BucketTracker::is_launched(int64_t param) const {
  return buckets_[params_[checked(param)].bucket].launched;
}

size_t BucketTracker::checked(int64_t param) const {
  if (param < 0 || param >= num_params()) {
    throw std::out_of_range(base::format_text(
        "parameter {} is not in this tracker of {} parameters", param, params_.size()));
  }
  return static_cast<size_t>(param);
}

void BucketTracker::skip_waiting() {
  while (next_ < buckets_.size() && buckets_[next_].waits) {
    ++next_;
  }
}

}  // namespace megacore::buffer
