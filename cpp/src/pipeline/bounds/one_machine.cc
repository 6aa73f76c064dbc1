#include "bounds/one_machine.h"

#include <algorithm>
#include <limits>

namespace megacore::pipeline {

double queue_makespan(std::span<const JobClass> classes) {
  std::vector<size_t> next(classes.size(), 0);
  double now = 0.0;
  while (true) {
    size_t first = classes.size();
    double head = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < classes.size(); ++i) {
      if (next[i] == classes[i].heads.size() || classes[i].heads[next[i]] >= head) continue;
      first = i;
      head = classes[i].heads[next[i]];
    }
    if (first == classes.size()) return now;
    now = std::max(now, head) + classes[first].duration;
    ++next[first];
  }
}

double delivery_makespan(std::span<const JobClass> classes) {
  struct State {
    size_t job = 0;     // the first that is not over
    double left = 0.0;  // of its duration
  };
  std::vector<State> states(classes.size());
  for (size_t i = 0; i < classes.size(); ++i) states[i].left = classes[i].duration;
  double now = 0.0;
  double delivered = 0.0;
  while (true) {
    // The longest tail that is there, and when the next class that waits gets its first job. Later
    // jobs of a class that is there have shorter tails than its first.
    size_t longest = classes.size();
    double longest_tail = -1.0;
    double next_head = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < classes.size(); ++i) {
      if (states[i].job == classes[i].heads.size()) continue;
      const double head = classes[i].heads[states[i].job];
      if (head > now) {
        next_head = std::min(next_head, head);
      } else if (classes[i].tail(states[i].job) > longest_tail) {
        longest = i;
        longest_tail = classes[i].tail(states[i].job);
      }
    }
    if (longest == classes.size()) {
      if (next_head == std::numeric_limits<double>::infinity()) return delivered;
      now = next_head;
      continue;
    }
    State& state = states[longest];
    const double end = now + state.left;
    if (next_head < end) {
      state.left = end - next_head;
      now = next_head;
      continue;
    }
    now = end;
    delivered = std::max(delivered, now + longest_tail);
    ++state.job;
    state.left = classes[longest].duration;
  }
}

}  // namespace megacore::pipeline
