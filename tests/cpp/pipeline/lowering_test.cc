#include "megacore/pipeline/program/lowering.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <stdexcept>
#include <string>

#include "megacore/pipeline/program/state_machine.h"
#include "megacore/pipeline/program/validate_programs.h"
#include "megacore/pipeline/schedules/generators.h"
#include "schedule_checks.h"

namespace megacore::pipeline {
namespace {

std::string programs_error(const std::vector<Program>& programs) {
  return message_of([&] { validate_programs(programs); });
}

size_t position_of(const Program& program, const std::string& action) {
  const auto step = std::find_if(program.steps.begin(), program.steps.end(),
                                 [&](const ProgramStep& s) { return to_text(s.action) == action; });
  return static_cast<size_t>(step - program.steps.begin());
}

std::vector<Program> two_ranks() {
  return lower(one_f_one_b({.num_ranks = 2, .num_microbatches = 2}));
}

TEST(Lower, ReceivesStandBeforeTheComputeThatPrecedesTheirReader) {
  const auto programs = two_ranks();
  EXPECT_EQ(to_text(programs[0]), "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1");
  EXPECT_EQ(to_text(programs[1]), "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1");
}

TEST(Lower, NeighbouringStagesOnOneRankNeedNoMessage) {
  const auto programs =
      lower(schedule_from_text("rank 0: 0F0 3F0 3B0 0B0\n"
                               "rank 1: 1F0 2F0 2B0 1B0\n"));
  EXPECT_EQ(to_text(programs[1]), "1RECV_F0 1F0 2RECV_B0 2F0 2SEND_F0 2B0 1B0 1SEND_B0");
  EXPECT_EQ(programs_error(programs), "no error");
  EXPECT_EQ(to_text(lower(gpipe({.num_ranks = 1, .num_microbatches = 1}))[0]), "0F0 0B0");
}

TEST(Lower, InOrderFollowsTheTimesAtWhichMessagesAreMade) {
  const auto programs =
      lower(one_f_one_b({.num_ranks = 2, .num_microbatches = 3}), Receives::kInOrder);
  // 0F0 is made at 1, 0F1 at 2, 1B0 at 4, then 0F2 and 1B1 both at 7: the sender 0 goes first.
  EXPECT_EQ(to_text(programs[0]),
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2");
  EXPECT_EQ(to_text(programs[1]),
            "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1SEND_B2");
}

// Both ends of a pair that overlaps: receives before it, sends behind it.
TEST(Lower, PairsThatOverlapStayTogether) {
  const auto schedule = dualpipe_v({.num_ranks = 2, .num_microbatches = 4});
  EXPECT_TRUE(
      mentions(to_text(lower(schedule)[1]), "1RECV_F3 2RECV_B1 2F2 1B0 2SEND_F2 1SEND_B0 1F3 2B1"));
  for (const Receives receives : {Receives::kAhead, Receives::kInOrder}) {
    for (const int ahead : {0, 1, 3}) {
      std::vector<Program> programs = lower(schedule, receives, ahead);
      EXPECT_NO_THROW(validate_programs(programs));
      size_t num_pairs = 0;
      for (const Program& program : programs) {
        for (const ProgramStep& step : program.steps) num_pairs += step.starts_pair ? 1 : 0;
      }
      EXPECT_EQ(num_pairs, schedule.overlaps.size());
    }
  }
}

TEST(Lower, ReceivesStandAsFarAheadAsAsked) {
  const Schedule schedule = gpipe({.num_ranks = 2, .num_microbatches = 4});
  EXPECT_EQ(to_text(lower(schedule, Receives::kAhead, 0)[1]).substr(0, 35),
            "1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 ");
  EXPECT_EQ(to_text(lower(schedule, Receives::kAhead, 2)[1]).substr(0, 40),
            "1RECV_F0 1RECV_F1 1RECV_F2 1F0 1RECV_F3 ");
  EXPECT_EQ(message_of([&] { lower(schedule, Receives::kAhead, -1); }).substr(0, 11),
            "ahead is -1");
}

// With two ranks, forwards and backwards of different chunks share a channel and are read in
// another order than they are sent.
TEST(Lower, KeepsEveryChannelInTheOrderOfSending) {
  std::mt19937 random(3);
  const auto below = [&](int limit) {
    return std::uniform_int_distribution<int>(0, limit - 1)(random);
  };
  for (int round = 0; round < 200; ++round) {
    const int p = 2 + below(4);
    const int v = 1 + below(3);
    const int m = 1 + below(10);
    const Schedule schedule =
        interleaved_one_f_one_b({.num_ranks = p, .num_chunks = v, .num_microbatches = m});
    for (const Receives receives : {Receives::kAhead, Receives::kInOrder}) {
      const auto programs = lower(schedule, receives);
      ASSERT_EQ(programs_error(programs), "no error");
      std::vector<Program> evaluation;
      for (const Program& program : programs) evaluation.push_back(forward_only(program));
      ASSERT_EQ(programs_error(evaluation), "no error");
      const auto direct = lower(forward_only(schedule), receives);
      for (size_t rank = 0; rank < direct.size(); ++rank) {
        EXPECT_EQ(to_text(evaluation[rank]), to_text(direct[rank]));
      }
    }
  }
}

// Buffers of sent messages live until a later message proves them received: a few per neighbour,
// not one per microbatch.
TEST(Lower, AcknowledgementsBoundTheBuffersOfSends) {
  for (const int m : {16, 64}) {
    const int p = 4;
    for (const Program& program : lower(one_f_one_b({.num_ranks = p, .num_microbatches = m}))) {
      std::map<int, int> sent;
      std::map<int, int> freed;
      std::map<std::string, int> acknowledged;
      int peak = 0;
      for (const ProgramStep& step : program.steps) {
        if (is_send(step.action.kind)) ++sent[step.peer];
        if (is_recv(step.action.kind)) {
          const bool forward = step.action.kind == ActionKind::kRecvForward;
          const Action reader{step.action.stage,
                              forward ? ActionKind::kForward : ActionKind::kBackward,
                              step.action.microbatch};
          acknowledged[to_text(reader)] = step.acknowledged;
        }
        if (is_compute(step.action.kind) && acknowledged.contains(to_text(step.action))) {
          const int peer =
              step.action.kind == ActionKind::kForward ? program.rank - 1 : program.rank + 1;
          freed[peer] = std::max(freed[peer], acknowledged[to_text(step.action)]);
        }
        for (const auto& [peer, count] : sent) peak = std::max(peak, count - freed[peer]);
      }
      EXPECT_LE(peak, p + 1) << "rank " << program.rank << " m " << m;
    }
  }
}

TEST(ValidatePrograms, FindsAMessageWithoutItsOtherEnd) {
  auto programs = two_ranks();
  auto& steps = programs[0].steps;
  steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(position_of(programs[0], "0SEND_F1")));
  EXPECT_TRUE(mentions(programs_error(programs), "1RECV_F1 has no send: rank 0 never sends"));

  programs = two_ranks();
  auto& others = programs[1].steps;
  others.erase(others.begin() + static_cast<std::ptrdiff_t>(position_of(programs[1], "1RECV_F1")));
  EXPECT_TRUE(
      mentions(programs_error(programs), "1F1 reads a message, but no 1RECV_F1 stands before it"));
}

TEST(ValidatePrograms, FindsMessagesReceivedInAnotherOrder) {
  auto programs = lower(gpipe({.num_ranks = 2, .num_microbatches = 3}));
  auto& steps = programs[1].steps;
  std::swap(steps[position_of(programs[1], "1RECV_F0")],
            steps[position_of(programs[1], "1RECV_F1")]);
  EXPECT_TRUE(mentions(programs_error(programs),
                       "from rank 0 to rank 1, message 0 is sent as 0SEND_F0 but received as "
                       "1RECV_F1"));
}

TEST(ValidatePrograms, FindsLateReceivesEarlySendsAndWrongPeers) {
  auto programs = two_ranks();
  std::swap(programs[1].steps[0], programs[1].steps[1]);
  EXPECT_TRUE(mentions(programs_error(programs), "rank 1, position 0: 1F0 reads a message"));

  programs = two_ranks();
  std::swap(programs[0].steps[0], programs[0].steps[1]);
  EXPECT_TRUE(
      mentions(programs_error(programs), "stands before the action that makes its message"));

  programs = two_ranks();
  programs[0].steps[1].peer = 0;
  EXPECT_TRUE(mentions(programs_error(programs), "names rank 0 as its other end; it is rank 1"));

  programs = two_ranks();
  programs[0].steps[1].action.stage = 7;
  EXPECT_TRUE(mentions(programs_error(programs), "7SEND_F0 does not belong to this rank"));

  programs = two_ranks();
  programs[0].steps.push_back(programs[0].steps[1]);
  EXPECT_TRUE(mentions(programs_error(programs), "0SEND_F0 is repeated"));
}

TEST(ValidatePrograms, FindsASendThatComesTooLateForEveryone) {
  auto programs = two_ranks();
  auto& steps = programs[0].steps;  // 0SEND_F0 behind 0B0, which waits for its answer
  const ProgramStep send = steps[1];
  steps.erase(steps.begin() + 1);
  steps.insert(steps.begin() + static_cast<std::ptrdiff_t>(position_of(programs[0], "0B0")) + 1,
               send);
  // The channel is then also out of order, which is found first: put the other send behind, too.
  const size_t second = position_of(programs[0], "0SEND_F1");
  const ProgramStep other = steps[second];
  steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(second));
  steps.push_back(other);
  const std::string text = programs_error(programs);
  EXPECT_TRUE(mentions(text, "they deadlock"));
  EXPECT_TRUE(mentions(text, "0B0 waits for 0RECV_B0 from rank 1"));
  EXPECT_TRUE(mentions(text, "1F0 waits for 1RECV_F0 from rank 0"));
  EXPECT_TRUE(mentions(text, ">0B0<"));
}

// Posting ahead is what one queue per pair of ranks cannot take.
TEST(ValidatePrograms, FindsProgramsThatNeedMoreThanOneQueue) {
  auto programs = lower(one_f_one_b({.num_ranks = 2, .num_microbatches = 4}));
  EXPECT_EQ(programs_error(programs), "no error");
  for (Program& program : programs) program.receives = Receives::kInOrder;
  EXPECT_TRUE(
      mentions(programs_error(programs), "their sends and receives do not follow one order"));
}

TEST(ValidatePrograms, FindsAPrematureAcknowledgement) {
  auto programs = two_ranks();
  programs[0].steps[position_of(programs[0], "0RECV_B0")].acknowledged = 2;
  EXPECT_TRUE(
      mentions(programs_error(programs), "0RECV_B0 acknowledges 2 sends, but when it is sent"));
}

TEST(ValidatePrograms, FindsProgramsThatDoNotBelongTogether) {
  auto programs = two_ranks();
  programs.pop_back();
  EXPECT_TRUE(mentions(programs_error(programs), "there are 1 programs for 2 ranks"));
  programs = two_ranks();
  std::swap(programs[0], programs[1]);
  EXPECT_TRUE(mentions(programs_error(programs), "program 0 is that of rank 1"));
  EXPECT_TRUE(mentions(programs_error({}), "there are no programs"));
}

// Any dropped, repeated or exchanged communication step is found.
TEST(ValidatePrograms, FindsSeededFaults) {
  std::mt19937 random(11);
  const auto below = [&](size_t limit) {
    return std::uniform_int_distribution<size_t>(0, limit - 1)(random);
  };
  for (int round = 0; round < 300; ++round) {
    const auto good =
        lower(interleaved_one_f_one_b({.num_ranks = 2 + static_cast<int>(below(3)),
                                       .num_chunks = 1 + static_cast<int>(below(3)),
                                       .num_microbatches = 2 + static_cast<int>(below(6))}));
    const size_t rank = below(good.size());
    std::vector<size_t> messages;
    for (size_t i = 0; i < good[rank].steps.size(); ++i) {
      if (!is_compute(good[rank].steps[i].action.kind)) messages.push_back(i);
    }
    const size_t a = messages[below(messages.size())];

    auto dropped = good;
    dropped[rank].steps.erase(dropped[rank].steps.begin() + static_cast<std::ptrdiff_t>(a));
    EXPECT_NE(programs_error(dropped), "no error");

    auto repeated = good;
    repeated[rank].steps.push_back(repeated[rank].steps[a]);
    EXPECT_NE(programs_error(repeated), "no error");

    const size_t b = messages[below(messages.size())];
    const ProgramStep& first = good[rank].steps[a];
    const ProgramStep& second = good[rank].steps[b];
    const bool same_channel = a != b && first.peer == second.peer &&
                              is_send(first.action.kind) == is_send(second.action.kind);
    if (!same_channel) continue;
    auto swapped = good;
    std::swap(swapped[rank].steps[a], swapped[rank].steps[b]);
    EXPECT_NE(programs_error(swapped), "no error");
  }
}

TEST(StateMachine, WalksAProgramToItsEnd) {
  StateMachine machine(two_ranks()[1]);
  size_t count = 0;
  while (const ProgramStep* step = machine.next()) {
    const Action action = step->action;
    EXPECT_EQ(machine.position(), count++);
    machine.start(action);
    EXPECT_TRUE(machine.is_running());
    EXPECT_EQ(machine.next()->action, action);
    machine.complete(action);
  }
  EXPECT_EQ(count, 8U);
  machine.reset();
  EXPECT_EQ(machine.position(), 0U);
}

TEST(StateMachine, IllegalTransitionsNamePositionExpectedAndGot) {
  const auto error_of_call = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const std::logic_error& error) {
      return error.what();
    }
    return "no error";
  };
  StateMachine machine(two_ranks()[1]);
  const Action receive = parse_action("1RECV_F0");
  const Action forward = parse_action("1F0");
  EXPECT_EQ(error_of_call([&] { machine.start(forward); }),
            "rank 1, position 0 of 8: expected start 1RECV_F0, got start 1F0");
  EXPECT_EQ(error_of_call([&] { machine.complete(receive); }),
            "rank 1, position 0 of 8: expected start 1RECV_F0, got complete 1RECV_F0");
  machine.start(receive);
  EXPECT_EQ(error_of_call([&] { machine.start(receive); }),
            "rank 1, position 0 of 8: expected complete 1RECV_F0, got start 1RECV_F0");
  EXPECT_EQ(error_of_call([&] { machine.complete(forward); }),
            "rank 1, position 0 of 8: expected complete 1RECV_F0, got complete 1F0");
  machine.reset();
  while (machine.next() != nullptr) {
    const Action action = machine.next()->action;
    machine.start(action);
    machine.complete(action);
  }
  EXPECT_EQ(error_of_call([&] { machine.start(forward); }),
            "rank 1, position 8 of 8: expected nothing more: the program is finished, got start "
            "1F0");
}

}  // namespace
}  // namespace megacore::pipeline
