#include "megacore/buffer/bucket_tracker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>

namespace megacore::buffer {
namespace {

using Ids = std::vector<int64_t>;
using Buckets = std::vector<Ids>;

// A first step in which every parameter receives `uses[param]` gradients.
void learn(BucketTracker& tracker, const Ids& uses) {
  tracker.start();
  for (size_t param = 0; param < uses.size(); ++param) {
    for (int64_t i = 0; i < uses[param]; ++i) {
      ASSERT_TRUE(tracker.mark(static_cast<int64_t>(param)).empty()) << "nothing is known yet";
    }
  }
  tracker.finish();
}

TEST(BucketTracker, LaunchesNothingBeforeTheFirstStepHasEnded) {
  BucketTracker tracker(Buckets{{2, 1}, {0}});
  tracker.start();
  for (const int64_t param : {2, 1, 0}) {
    EXPECT_TRUE(tracker.mark(param).empty());
  }
  EXPECT_EQ(tracker.finish(), (Ids{0, 1}));
}

TEST(BucketTracker, LaunchesABucketWithItsLastGradient) {
  BucketTracker tracker(Buckets{{2, 1}, {0}});
  learn(tracker, {1, 1, 1});
  tracker.start();
  EXPECT_TRUE(tracker.mark(1).empty());
  EXPECT_FALSE(tracker.is_launched(1));
  EXPECT_EQ(tracker.mark(2), (Ids{0}));
  EXPECT_TRUE(tracker.is_launched(1));
  EXPECT_EQ(tracker.mark(0), (Ids{1}));
  EXPECT_TRUE(tracker.finish().empty());
}

TEST(BucketTracker, CountsParametersThatAreUsedSeveralTimes) {
  BucketTracker tracker(Buckets{{0}});
  learn(tracker, {3});
  EXPECT_EQ(tracker.expected(0), 3);
  tracker.start();
  EXPECT_TRUE(tracker.mark(0).empty());
  EXPECT_TRUE(tracker.mark(0).empty());
  EXPECT_EQ(tracker.mark(0), (Ids{0}));
}

TEST(BucketTracker, ACompleteBucketWaitsForThoseBefore) {
  BucketTracker tracker(Buckets{{2}, {1}, {0}});
  learn(tracker, {1, 1, 1});
  tracker.start();
  EXPECT_TRUE(tracker.mark(0).empty());
  EXPECT_TRUE(tracker.mark(1).empty());
  EXPECT_EQ(tracker.mark(2), (Ids{0, 1, 2}));
}

TEST(BucketTracker, FlaggedBucketsLaunchLastAndHoldUpNobody) {
  BucketTracker tracker(Buckets{{2}, {1}, {0}}, {true, false, false});
  learn(tracker, {1, 1, 1});
  tracker.start();
  EXPECT_TRUE(tracker.mark(2).empty());
  EXPECT_EQ(tracker.mark(1), (Ids{1}));
  EXPECT_EQ(tracker.finish(), (Ids{2, 0}));
}

TEST(BucketTracker, AParameterThatNeverHadAGradientMayStillGetOne) {
  BucketTracker tracker(Buckets{{1}, {0}});
  learn(tracker, {1, 0});
  tracker.start();
  EXPECT_TRUE(tracker.mark(0).empty());  // bucket 0 is not complete, and keeps the order
  EXPECT_TRUE(tracker.mark(1).empty());
  EXPECT_EQ(tracker.finish(), (Ids{0, 1}));
  tracker.start();
  EXPECT_EQ(tracker.mark(1), (Ids{0}));
}

TEST(BucketTracker, RefusesAGradientThatComesTooLateAndLearnsFromOneInTime) {
  BucketTracker tracker(Buckets{{1, 0}});
  learn(tracker, {1, 1});
  tracker.start();
  tracker.mark(1);
  EXPECT_TRUE(tracker.mark(1).empty());  // more than before, but nothing is lost yet
  EXPECT_EQ(tracker.mark(0), (Ids{0}));
  EXPECT_THROW(tracker.mark(0), std::invalid_argument);
  tracker.finish();
  EXPECT_EQ(tracker.expected(1), 2);
  EXPECT_EQ(tracker.expected(0), 1);
}

TEST(BucketTracker, RejectsWhatIsNoPartition) {
  EXPECT_THROW(BucketTracker(Buckets{{0}, {0}}), std::invalid_argument);
  EXPECT_THROW(BucketTracker(Buckets{{0}, {}}), std::invalid_argument);
  EXPECT_THROW(BucketTracker(Buckets{{1}}), std::invalid_argument);
  EXPECT_THROW(BucketTracker(Buckets{{0}}, std::vector<bool>{true, false}), std::invalid_argument);
  EXPECT_THROW(BucketTracker(Buckets{{0}}).mark(1), std::out_of_range);
}

// Whatever the order of gradients: each bucket once, never before its last gradient, in order.
TEST(BucketTracker, OrderOfLaunchesDoesNotDependOnOrderOfGradients) {
  std::mt19937_64 random(5);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int trial = 0; trial < 20000; ++trial) {
    SCOPED_TRACE(trial);
    // Parameters in random order, dealt to buckets of one to three.
    Ids order(static_cast<size_t>(pick(1, 10)));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    std::vector<Ids> buckets;
    std::vector<bool> waits;
    Ids uses, marks, launched;
    for (const int64_t param : order) {
      if (buckets.empty() || pick(0, 2) == 0) {
        buckets.emplace_back();
        waits.push_back(pick(0, 4) == 0);
      }
      buckets.back().push_back(param);
    }
    for (int64_t param = 0; param < static_cast<int64_t>(order.size()); ++param) {
      uses.push_back(pick(1, 3));
      marks.insert(marks.end(), static_cast<size_t>(uses.back()), param);
    }
    BucketTracker tracker(buckets, waits);
    learn(tracker, uses);
    std::shuffle(marks.begin(), marks.end(), random);
    tracker.start();
    for (const int64_t param : marks) {
      for (const int64_t bucket : tracker.mark(param)) {
        for (const int64_t member : buckets[static_cast<size_t>(bucket)]) {
          ASSERT_EQ(tracker.count(member), uses[static_cast<size_t>(member)]);
        }
        launched.push_back(bucket);
      }
    }
    const Ids rest = tracker.finish();
    launched.insert(launched.end(), rest.begin(), rest.end());
    Ids wanted;
    for (const bool waiting : {false, true}) {
      for (size_t b = 0; b < buckets.size(); ++b) {
        if (waits[b] == waiting) {
          wanted.push_back(static_cast<int64_t>(b));
        }
      }
    }
    ASSERT_EQ(launched, wanted);
  }
}

}  // namespace
}  // namespace megacore::buffer
