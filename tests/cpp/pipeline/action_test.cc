#include "megacore/pipeline/action.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace megacore::pipeline {
namespace {

TEST(Action, EveryKindSurvivesTextAndBack) {
  for (size_t kind = 0; kind < kKindText.size(); ++kind) {
    for (const int32_t number : {0, 7, 10, 1023, INT32_MAX}) {
      const Action action{number, static_cast<ActionKind>(kind), number};
      EXPECT_EQ(parse_action(to_text(action)), action) << to_text(action);
    }
  }
}

TEST(Action, TextFollowsThePyTorchCells) {
  EXPECT_EQ(to_text({2, ActionKind::kForward, 0}), "2F0");
  EXPECT_EQ(to_text({2, ActionKind::kBackwardInput, 0}), "2I0");
  EXPECT_EQ(to_text({2, ActionKind::kBackwardWeight, 0}), "2W0");
  EXPECT_EQ(to_text({2, ActionKind::kSendForward, 0}), "2SEND_F0");
  EXPECT_EQ(to_text({10, ActionKind::kRecvBackward, 11}), "10RECV_B11");
  EXPECT_EQ(to_text({3, ActionKind::kRecompute, 4}), "3RECOMPUTE4");
}

TEST(Action, RefusesWhatIsNotExactlyOneAction) {
  for (const char* text : {"", "F0", "2F", "2", "2f0", "2F0 ", " 2F0", "2F0x", "2F-1", "2G0",
                           "2SEND0", "2SEND_W0", "2F0;3B1", "2REDUCE_GRADS0", "2REDUCE_GRADS",
                           "2RELEASE0", "99999999999F0", "2F99999999999"}) {
    EXPECT_THROW(parse_action(text), std::invalid_argument) << text;
  }
}

}  // namespace
}  // namespace megacore::pipeline
