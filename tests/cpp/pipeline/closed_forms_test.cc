// Thousands of random sizes and costs: every schedule is valid, takes what its closed form says,
// and holds no more than its memory bound.

#include <gtest/gtest.h>

#include <random>

#include "megacore/base/check.h"
#include "megacore/pipeline/schedules/generators.h"
#include "schedule_checks.h"

namespace megacore::pipeline {
namespace {

TEST(ClosedForms, HoldForRandomSizesAndCosts) {
  std::mt19937 random(31);
  const auto between = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  int checked = 0;
  for (int round = 0; round < 4000; ++round) {
    const int p = between(1, 6);
    const int v = between(1, 3);
    const int kind = between(0, 3);
    const int m = kind == 2 ? p * between(1, 4) : between(1, 20);
    const double f = between(1, 16) / 8.0;
    const double i = between(0, 16) / 8.0;
    const double w = between(0, 16) / 8.0;
    const int group = kind == 2 ? p * between(1, m / p) : m;  // m: all in one, p | m or not
    if (kind >= 2 && (m % group != 0 || m < p)) continue;
    const Schedule schedule =
        kind == 0 ? gpipe({.num_ranks = p, .num_microbatches = m})
        : kind == 1
            ? one_f_one_b({.num_ranks = p, .num_microbatches = m})
            : interleaved_one_f_one_b(
                  {.num_ranks = p, .num_chunks = v, .num_microbatches = m, .group_size = group});
    const int chunks = kind >= 2 ? v : 1;
    const std::string sizes = base::format_text("{} p {} v {} m {}", schedule.name, p, chunks, m);
    ASSERT_NO_THROW(validate(schedule)) << sizes;
    const Timeline timeline =
        simulate(schedule, {.forward = {f}, .backward_input = {i}, .backward_weight = {w}});
    EXPECT_EQ(timeline.makespan, (chunks * m + p - 1) * (f + i + w)) << sizes;
    std::vector<int64_t> bounds;
    for (int r = 0; r < p; ++r) {
      const int form = kind == 0 ? m
                       : kind == 1
                           ? std::min(p - r, m)
                           : std::min((v > 1 ? 2 : 1) * (p - 1 - r) + (v - 1) * group + 1, v * m);
      bounds.push_back(form);
    }
    EXPECT_EQ(timeline.peak_in_flight, bounds) << sizes;
    EXPECT_NO_THROW(validate_memory(schedule, bounds)) << sizes;
    ++checked;
  }
  EXPECT_GT(checked, 2500);
}

}  // namespace
}  // namespace megacore::pipeline
