#include <gtest/gtest.h>

#include "megacore/pipeline/schedules/generators.h"
#include "megacore/pipeline/schedules/schedule_catalog.h"
#include "schedule_checks.h"

namespace megacore::pipeline {
namespace {

// Every receive directly before its reader, whatever the order of sending.
std::vector<Program> deferred(const Schedule& schedule) {
  std::vector<Program> programs = lower(schedule, Receives::kAhead, 0);
  for (Program& program : programs) {
    std::vector<ProgramStep> receives;
    std::erase_if(program.steps, [&](const ProgramStep& step) {
      if (is_recv(step.action.kind)) receives.push_back(step);
      return is_recv(step.action.kind);
    });
    for (const ProgramStep& receive : receives) {
      const bool forward = receive.action.kind == ActionKind::kRecvForward;
      const auto reader =
          std::find_if(program.steps.begin(), program.steps.end(), [&](const ProgramStep& step) {
            return step.action.stage == receive.action.stage &&
                   step.action.microbatch == receive.action.microbatch &&
                   (forward ? step.action.kind == ActionKind::kForward
                            : gives_input_gradient(step.action.kind));
          });
      program.steps.insert(reader, receive);
    }
  }
  return programs;
}

TEST(Deadlock, InOrderProgramsRunOnOneQueueAndAheadOnesOnQueuesPerChannel) {
  int count = 0;
  for (const ScheduleInfo& info : schedule_catalog()) {
    for (const int p : {2, 3, 4, 8}) {
      for (const int m : {p, 2 * p, 4 * p}) {
        Schedule schedule = gpipe({.num_ranks = 1, .num_microbatches = 1});
        try {
          schedule = build_schedule(info.name, {.num_ranks = p, .num_microbatches = m});
        } catch (const std::invalid_argument&) {
          continue;  // sizes that this schedule does not have
        }
        ++count;
        EXPECT_NO_THROW(validate_programs(lower(schedule, Receives::kInOrder)))
            << info.name << " p " << p << " m " << m;
        EXPECT_NO_THROW(validate_programs(lower(schedule, Receives::kAhead, 2))) << info.name;
      }
    }
  }
  EXPECT_GT(count, 120);
}

// The message names, for each rank, its head, what that needs and what stands in the way.
TEST(Deadlock, TheReportMarksEveryStuckRank) {
  auto programs = lower(one_f_one_b({.num_ranks = 2, .num_microbatches = 4}));
  EXPECT_NO_THROW(validate_programs(programs));
  for (Program& program : programs) program.receives = Receives::kInOrder;
  EXPECT_EQ(message_of([&] { validate_programs(programs); }),
            "the programs are not valid: they deadlock, 2 of 2 ranks, with one queue per rank: "
            "their sends and receives do not follow one order\n"
            "  rank 0 stops at position 5: 0B0 waits for 0RECV_B0 from rank 1; its queue stands at "
            "0RECV_B0 (rank 0, position 2), which needs 1SEND_B0 (rank 1, position 4), behind "
            "1RECV_F1 (rank 1, position 2)\n"
            "  rank 1 stops at position 5: 1F1 waits for 1RECV_F1 from rank 0; its queue stands at "
            "1RECV_F1 (rank 1, position 2), which needs 0SEND_F1 (rank 0, position 4), behind "
            "0RECV_B0 (rank 0, position 2)\n"
            "rank 0: 0F0 0SEND_F0 >0RECV_B0< 0F1 0SEND_F1 >0B0< 0RECV_B1 0F2 0SEND_F2 0B1 "
            "0RECV_B2 0F3 0SEND_F3 0RECV_B3 0B2 0B3\n"
            "rank 1: 1RECV_F0 1F0 >1RECV_F1< 1B0 1SEND_B0 >1F1< 1RECV_F2 1B1 1SEND_B1 1F2 "
            "1RECV_F3 1B2 1SEND_B2 1F3 1B3 1SEND_B3\n");
}

// Receives that are deferred without regard to the order of sending swap messages of one shape.
TEST(Deadlock, DeferredReceivesAreRefused) {
  const auto programs = deferred(zb_v({.num_ranks = 4, .num_microbatches = 8}));
  EXPECT_NE(message_of([&] {
              validate_programs(programs);
            }).find("a channel must be received in the order of sending"),
            std::string::npos);
  EXPECT_NO_THROW(validate_programs(deferred(gpipe({.num_ranks = 4, .num_microbatches = 8}))));
}

}  // namespace
}  // namespace megacore::pipeline
