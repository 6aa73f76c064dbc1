#include "megacore/parallel/topology.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace megacore::parallel {
namespace {

std::string message_of(const TopologyConfig& config) {
  try {
    make_topology(config);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no exception";
}

TEST(Topology, DerivesBothDataParallelSizes) {
  const Topology world =
      make_topology({.world_size = 256, .tp = 4, .cp = 2, .pp = 4, .ep = 64, .etp = 1});
  EXPECT_EQ(world.dp, 8);
  EXPECT_EQ(world.expert_dp, 1);
  EXPECT_EQ(world.dense.world_size(), 256);
  EXPECT_EQ(world.expert.world_size(), 256);
}

TEST(Topology, LetsContextAndExpertParallelShareEightRanks) {
  const Topology world = make_topology({.world_size = 8, .cp = 8, .ep = 8});
  EXPECT_EQ(world.dense.groups("cp"), world.expert.groups("ep"));
}

TEST(Topology, TakesExpertTensorParallelFromTensorParallel) {
  EXPECT_EQ(make_topology({.world_size = 8, .tp = 2, .ep = 2}).etp, 2);
  EXPECT_EQ(make_topology({.world_size = 8, .tp = 2, .ep = 2, .etp = 1}).etp, 1);
}

TEST(Topology, HasEqualPipelineGroupsInBothViews) {
  for (const char* order : {"tp-cp-ep-dp-pp", "pp-tp-cp-ep-dp", "dp-ep-cp-tp-pp"}) {
    SCOPED_TRACE(order);
    const Topology world = make_topology(
        {.world_size = 32, .tp = 2, .cp = 2, .pp = 2, .ep = 4, .etp = 1, .order = order});
    EXPECT_EQ(world.dense.groups("pp"), world.expert.groups("pp"));
  }
}

TEST(Topology, AcceptsPipelineInTheMiddleWhenTheStridesAgree) {
  const Topology world = make_topology(
      {.world_size = 16, .tp = 2, .cp = 2, .pp = 2, .ep = 2, .etp = 4, .order = "tp-cp-pp-ep-dp"});
  EXPECT_EQ(world.dense.groups("pp"), world.expert.groups("pp"));
}

TEST(Topology, ExplainsPipelineGroupsThatDiffer) {
  EXPECT_EQ(message_of({.world_size = 16,
                        .tp = 2,
                        .cp = 2,
                        .pp = 2,
                        .ep = 2,
                        .etp = 1,
                        .order = "tp-cp-pp-ep-dp"}),
            "order \"tp-cp-pp-ep-dp\" gives dense and expert layers different pipeline groups: "
            "stages are tp 2 x cp 2 = 4 ranks apart in the dense view but 1 in the expert view; "
            "put pp last (\"tp-cp-ep-dp-pp\"); nearest legal settings: pp 1, or etp 4");
}

TEST(Topology, ShowsTheProductAndTheNearestLegalSettings) {
  EXPECT_EQ(message_of({.world_size = 12, .tp = 2, .pp = 4}),
            "world_size 12 is not divisible by tp 2 x cp 1 x pp 4 = 8 (dense layers); nearest "
            "legal settings: world_size 8 or 16, or tp 1 or 3, or pp 3");
}

TEST(Topology, ChecksTheExpertProductToo) {
  EXPECT_EQ(message_of({.world_size = 16, .tp = 4, .pp = 2, .ep = 4}),
            "world_size 16 is not divisible by etp 4 x ep 4 x pp 2 = 32 (expert layers; etp "
            "defaults to tp); nearest legal settings: world_size 32, or tp 2, or pp 1, or ep 2, or "
            "etp 2");
}

TEST(Topology, SuggestsOnlySettingsThatAreLegal) {
  // World sizes that suit both views: multiples of lcm(8, 6) = 24.
  EXPECT_NE(message_of({.world_size = 40, .tp = 4, .pp = 2, .ep = 3, .etp = 1})
                .find("world_size 24 or 48"),
            std::string::npos);
}

TEST(Topology, NamesTheSizeThatIsTooSmall) {
  EXPECT_EQ(message_of({.world_size = 8, .tp = 0}), "tp is 0; an axis size must be at least 1");
  EXPECT_EQ(message_of({.world_size = 8, .etp = -2}), "etp is -2; an axis size must be at least 1");
  EXPECT_EQ(message_of({.world_size = 0}), "world_size must be between 1 and 2147483647, got 0");
}

TEST(Topology, SurvivesSizesWhoseProductOverflows) {
  const int64_t huge = int64_t{1} << 40;
  EXPECT_THROW(make_topology({.world_size = 8, .tp = huge, .cp = huge}), std::invalid_argument);
  EXPECT_THROW(make_topology({.world_size = 8, .tp = huge, .etp = 1}), std::invalid_argument);
  EXPECT_THROW(make_topology({.world_size = huge}), std::invalid_argument);
}

}  // namespace
}  // namespace megacore::parallel
