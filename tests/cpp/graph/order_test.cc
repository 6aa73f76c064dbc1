#include "megacore/graph/order.h"

#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace megacore::graph {
namespace {

Order parse(const std::vector<double>& entries) { return parse_order(entries); }

std::string message_of(const std::vector<double>& entries) {
  try {
    parse_order(entries);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(Order, CountsMicrobatchesPerChunkAndKind) {
  const Order order = parse({1, 2, 1, -2, 2, -1, -2, -1});
  EXPECT_EQ(order.num_chunks, 2);
  EXPECT_EQ(order.num_microbatches, 2);
  EXPECT_EQ(order.splits_backward, (std::vector<bool>{false, false}));
  EXPECT_EQ(order.steps[4], (OrderStep{StepKind::kForward, 1, 1}));
  EXPECT_EQ(order.steps[7], (OrderStep{StepKind::kBackward, 0, 1}));
  EXPECT_EQ(order_text(order), "1 2 1 -2 2 -1 -2 -1");
}

TEST(Order, WeightHalvesMayLagBehind) {
  const Order order = parse({1, 1, -1, -1, -1.5, -1.5});
  EXPECT_EQ(order.splits_backward, (std::vector<bool>{true}));
  EXPECT_EQ(order.steps[4], (OrderStep{StepKind::kBackwardWeight, 0, 0}));
  EXPECT_EQ(order_text(order), "1 1 -1 -1 -1.5 -1.5");
}

TEST(Order, OnlySomeChunksMaySplit) {
  EXPECT_EQ(parse({1, 2, -2, -2.5, -1}).splits_backward, (std::vector<bool>{false, true}));
}

TEST(Order, RefusesBadListsWithThePositionMarked) {
  EXPECT_NE(message_of({}).find("the order list is empty"), std::string::npos);
  EXPECT_NE(message_of({1, -2, -1}).find("order position 1: -2 in 1 [-2] -1"), std::string::npos);
  EXPECT_NE(message_of({-1, 1}).find("[-1] 1 is a backward pass without a forward pass"),
            std::string::npos);
  EXPECT_NE(message_of({1, -1, -1.5, -1.5}).find("order position 3: -1.5 in 1 -1 -1.5 [-1.5]"),
            std::string::npos);
  EXPECT_NE(message_of({1, -1.5, -1}).find("weight half without a backward pass of chunk 1"),
            std::string::npos);
  EXPECT_NE(message_of({1, 1, -1}).find("chunk 1 has 2 forward passes (+1) and 1 backward"),
            std::string::npos);
  EXPECT_NE(message_of({1, 1, -1, -1, -1.5}).find("split all of them or none"), std::string::npos);
  EXPECT_NE(message_of({1, -1, 3, -3}).find("chunk 2 has 0 forward passes"), std::string::npos);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double bad : {0.0, 0.5, 1.5, -0.5, -1.25, nan, infinity, -infinity}) {
    EXPECT_NE(message_of({1, bad}).find("names no step"), std::string::npos) << bad;
  }
  EXPECT_NE(message_of({1, 1e9}).find("above the limit"), std::string::npos);
}

TEST(Order, MarksAPlaceInALongList) {
  std::vector<double> entries(100, 1.0);
  entries[50] = 0;
  EXPECT_NE(message_of(entries).find("order position 50: 0 in ... 1 1 1 1 1 1 1 1 [0] 1 1 1 1 1 1 "
                                     "1 1 ... names no step"),
            std::string::npos);
}

}  // namespace
}  // namespace megacore::graph
