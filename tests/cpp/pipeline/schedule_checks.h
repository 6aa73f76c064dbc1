// What every generated schedule must pass.

#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "megacore/pipeline/program/lowering.h"
#include "megacore/pipeline/program/validate_programs.h"
#include "megacore/pipeline/simulate.h"
#include "megacore/pipeline/validate.h"

namespace megacore::pipeline {

inline Placement chain(int p) { return Placement::loop({.num_ranks = p, .num_chunks = 1}); }
inline Placement two_chunks(int p) { return Placement::loop({.num_ranks = p, .num_chunks = 2}); }
inline Placement v(int p) { return Placement::v({.num_ranks = p}); }

inline std::string row(const Schedule& schedule, int rank) {
  std::string text;
  for (const Action& action : schedule.rank_actions(rank)) {
    if (!text.empty()) text += ' ';
    append_text(action, text);
  }
  return text;
}

inline std::string message_of(const auto& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

inline testing::AssertionResult mentions(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "'" << part << "' is not in:\n" << text;
}

inline int64_t peak_of(const Timeline& timeline) {
  return *std::max_element(timeline.peak_in_flight.begin(), timeline.peak_in_flight.end());
}

// Time between the start of a rank's first action and the end of its last one.
inline double span_of(const Schedule& schedule, const Timeline& timeline, int rank) {
  const auto begin = static_cast<size_t>(schedule.offsets[static_cast<size_t>(rank)]);
  const auto end = static_cast<size_t>(schedule.offsets[static_cast<size_t>(rank) + 1]);
  return timeline.spans[end - 1].end - timeline.spans[begin].start;
}

// Validates the schedule, its evaluation form and its programs under both policies, and takes it
// through text and back. Returns its timeline.
inline Timeline checked(const Schedule& schedule, const Costs& costs = {}) {
  EXPECT_NO_THROW(validate(schedule));
  EXPECT_NO_THROW(validate(forward_only(schedule)));
  for (const Receives receives : {Receives::kAhead, Receives::kInOrder}) {
    const std::vector<Program> programs = lower(schedule, receives);
    EXPECT_NO_THROW(validate_programs(programs));
  }
  EXPECT_EQ(schedule_from_text(to_text(schedule)), schedule);
  if (schedule.placement.num_chains() == 1) {
    EXPECT_EQ(schedule_from_csv(to_csv(schedule), schedule.name), schedule);
  }
  return simulate(schedule, costs);
}

}  // namespace megacore::pipeline
