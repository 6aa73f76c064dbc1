#include "megacore/pipeline/schedules/schedule_catalog.h"

#include <gtest/gtest.h>

#include <set>

#include "schedule_checks.h"

namespace megacore::pipeline {
namespace {

// What the table says of a schedule is true of what its generator makes.
TEST(ScheduleCatalog, DescribesWhatItsGeneratorsMake) {
  std::set<std::string_view> names;
  for (const ScheduleInfo& info : schedule_catalog()) {
    SCOPED_TRACE(info.name);
    EXPECT_TRUE(names.insert(info.name).second);
    EXPECT_FALSE(info.summary.empty());
    ScheduleRequest request{.num_ranks = 4, .num_microbatches = 8};
    if (info.name == "no_pipelining") request.num_ranks = 1;
    if (info.num_chunks == 0) request.num_chunks = 3;
    const Schedule schedule = build_schedule(info.name, request);
    checked(schedule);
    EXPECT_EQ(schedule.name, info.name);
    EXPECT_EQ(schedule.placement.num_chunks(), info.num_chunks == 0 ? 3 : info.num_chunks);
    const bool splits = std::any_of(
        schedule.actions.begin(), schedule.actions.end(),
        [](const Action& action) { return action.kind == ActionKind::kBackwardWeight; });
    EXPECT_EQ(splits, info.splits_backward);
    const Placement expected =
        info.placement == PlacementKind::kV ? Placement::v({.num_ranks = 4})
        : info.placement == PlacementKind::kBidirectional
            ? Placement::bidirectional({.num_ranks = 4})
            : Placement::loop(
                  {.num_ranks = request.num_ranks, .num_chunks = request.num_chunks.value_or(1)});
    EXPECT_EQ(schedule.placement, expected);
  }
}

TEST(ScheduleCatalog, NamesAllSchedulesForAnUnknownOne) {
  const std::string text =
      message_of([] { build_schedule("zbv", {.num_ranks = 2, .num_microbatches = 2}); });
  EXPECT_NE(text.find("unknown schedule 'zbv'; choose one of no_pipelining, gpipe, 1f1b"),
            std::string::npos)
      << text;
}

TEST(ScheduleCatalog, RefusesOptionsThatAScheduleDoesNotTake) {
  for (const ScheduleInfo& info : schedule_catalog()) {
    SCOPED_TRACE(info.name);
    const ScheduleRequest plain{.num_ranks = info.name == "no_pipelining" ? 1 : 4,
                                .num_microbatches = 8};
    const auto refused = [&](const ScheduleRequest& request, const char* part) {
      const std::string text = message_of([&] { build_schedule(info.name, request); });
      return text.find(part) != std::string::npos;
    };
    ScheduleRequest request = plain;
    request.group_size = 4;
    EXPECT_EQ(refused(request, "has no groups"), !info.takes_group_size);
    request = plain;
    request.warmup_multiplier = 1;
    EXPECT_EQ(refused(request, "has a fixed warmup"), !info.takes_warmup_multiplier);
    request = plain;
    request.num_chunks = 3;
    EXPECT_EQ(refused(request, "num_chunks is 3; use num_chunks"), info.num_chunks != 0);
  }
}

}  // namespace
}  // namespace megacore::pipeline
