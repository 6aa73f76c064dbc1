// Every fault that is planted into a valid program is found.

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <random>

#include "megacore/pipeline/program/recompute.h"
#include "random_schedule.h"
#include "schedule_checks.h"

namespace megacore::pipeline {
namespace {

using Steps = std::vector<ProgramStep>;

class Faults {
 public:
  explicit Faults(unsigned seed) : random_(seed) {}

  Schedule any_schedule() {
    return random_schedule(random_placement(4, random_), 1 + below(4), coin(), random_);
  }

  std::vector<Program> random_programs(const Schedule& schedule) {
    const Receives receives = coin() ? Receives::kInOrder : Receives::kAhead;
    std::vector<Program> programs = lower(schedule, receives, below(3));
    if (coin()) return programs;
    const Recompute recompute{.keep = below(2)};
    for (Program& program : programs) program = add_recompute(std::move(program), recompute);
    return programs;
  }

  // Any step.
  bool drop(Steps& steps) {
    steps.erase(steps.begin() + below(static_cast<int>(steps.size())));
    return true;
  }

  // Any step, again at any later place.
  bool duplicate(Steps& steps) {
    const int from = below(static_cast<int>(steps.size()));
    const ProgramStep step = steps[static_cast<size_t>(from)];
    steps.insert(steps.begin() + from + 1 + below(static_cast<int>(steps.size()) - from), step);
    return true;
  }

  // Two transfers at one end of a channel.
  bool swap(Steps& steps) {
    const auto pair = two_of_a_channel(steps);
    if (!pair) return false;
    std::swap(steps[pair->first], steps[pair->second]);
    return true;
  }

  // A send or receive behind the next one of its channel.
  bool defer(Steps& steps) {
    const auto pair = two_of_a_channel(steps);
    if (!pair) return false;
    return move_behind(steps, pair->first, pair->second);
  }

  // A receive behind its reader.
  bool read_too_early(Steps& steps) {
    const auto receive = any(steps, [](const ProgramStep& s) { return is_recv(s.action.kind); });
    if (!receive) return false;
    const Action action = steps[*receive].action;
    const auto reader = any(steps, [&](const ProgramStep& s) {
      const bool forward = action.kind == ActionKind::kRecvForward;
      return s.action.stage == action.stage && s.action.microbatch == action.microbatch &&
             (forward ? s.action.kind == ActionKind::kForward
                      : gives_input_gradient(s.action.kind));
    });
    return move_behind(steps, *receive, *reader);
  }

  // A recomputation that its backward needs, behind it.
  bool recompute_late(Steps& steps) {
    const auto recompute =
        any(steps, [](const ProgramStep& s) { return s.action.kind == ActionKind::kRecompute; });
    return recompute && move_behind(steps, *recompute, *recompute + 1);
  }

  size_t pick(size_t limit) { return static_cast<size_t>(below(static_cast<int>(limit))); }

 private:
  int below(int limit) { return std::uniform_int_distribution<int>(0, limit - 1)(random_); }
  bool coin() { return below(2) == 0; }

  template <typename Predicate>
  std::optional<size_t> any(const Steps& steps, const Predicate& predicate) {
    std::vector<size_t> found;
    for (size_t i = 0; i < steps.size(); ++i) {
      if (predicate(steps[i])) found.push_back(i);
    }
    if (found.empty()) return std::nullopt;
    return found[pick(found.size())];
  }

  std::optional<std::pair<size_t, size_t>> two_of_a_channel(const Steps& steps) {
    const auto first = any(steps, [](const ProgramStep& s) { return is_transfer(s.action.kind); });
    if (!first) return std::nullopt;
    for (size_t i = *first + 1; i < steps.size(); ++i) {
      const bool same = is_transfer(steps[i].action.kind) && steps[i].peer == steps[*first].peer &&
                        is_send(steps[i].action.kind) == is_send(steps[*first].action.kind);
      if (same) return std::pair(*first, i);
    }
    return std::nullopt;
  }

  // Moves the step at `from` directly behind the one at `to`.
  static bool move_behind(Steps& steps, size_t from, size_t to) {
    std::rotate(steps.begin() + static_cast<std::ptrdiff_t>(from),
                steps.begin() + static_cast<std::ptrdiff_t>(from) + 1,
                steps.begin() + static_cast<std::ptrdiff_t>(to) + 1);
    return true;
  }

  std::mt19937 random_;
};

// Every program replaces the one before, which is freed.
void validate_one_by_one(const Schedule& schedule, const std::vector<Program>& programs) {
  std::unique_ptr<Program> current;
  validate_programs(schedule, programs.front().receives, [&](int rank) -> const Program& {
    return *(current = std::make_unique<Program>(programs[static_cast<size_t>(rank)]));
  });
}

TEST(SeededFaults, AllAreFoundInAThousandRandomPrograms) {
  struct Kind {
    const char* name;
    bool (Faults::*plant)(Steps&);
  };
  const std::vector<Kind> kinds = {{"drop", &Faults::drop},
                                   {"duplicate", &Faults::duplicate},
                                   {"swap", &Faults::swap},
                                   {"defer", &Faults::defer},
                                   {"read too early", &Faults::read_too_early},
                                   {"recompute late", &Faults::recompute_late}};
  std::map<std::string, int> planted;
  for (unsigned round = 0; round < 1000; ++round) {
    Faults faults(round);
    const Schedule schedule = faults.any_schedule();
    const std::vector<Program> good = faults.random_programs(schedule);
    ASSERT_NO_THROW(validate_programs(good)) << round;
    ASSERT_NO_THROW(validate_one_by_one(schedule, good)) << round;
    for (const Kind& kind : kinds) {
      std::vector<Program> bad = good;
      Program& program = bad[faults.pick(bad.size())];
      if (!(faults.*kind.plant)(program.steps)) continue;
      ++planted[kind.name];
      ASSERT_THROW(validate_programs(bad), std::invalid_argument)
          << kind.name << " in round " << round << " on rank " << program.rank << "\n"
          << to_text(program);
      ASSERT_THROW(validate_one_by_one(schedule, bad), std::invalid_argument)
          << kind.name << " in round " << round << " on rank " << program.rank;
    }
  }
  for (const Kind& kind : kinds) EXPECT_GT(planted[kind.name], 300) << kind.name;
}

}  // namespace
}  // namespace megacore::pipeline
