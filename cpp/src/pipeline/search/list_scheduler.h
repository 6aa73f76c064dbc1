// A list scheduler that cannot deadlock, however little memory there is. Private.
//
// Time goes on from event to event; a rank that is free takes, of what it can run, the action with
// the smallest key. It admits a forward only if every microbatch that has started can still finish:
// the oldest one first, each with the room that the older ones leave. As microbatches keep their
// order on every stage, no valid order ever breaks that rule, so nothing is lost by it.

#pragma once

#include <queue>
#include <utility>
#include <vector>

#include "search/instance.h"

namespace megacore::pipeline {

struct Policy {
  // Keys of F and of B or I, [num_stages], for microbatch 0.
  std::vector<double> forward_keys;
  std::vector<double> backward_keys;
  double slope = 0.0;  // what each microbatch adds
  // A stage holds at most this many activations; empty for no limit but the rank's.
  std::vector<int> caps = {};
  // A W waits for a gap, for more of them than this, or for a forward that needs its memory.
  int backlog = std::numeric_limits<int>::max();
  // How long a rank may wait for an action that is known to arrive.
  double patience = 0.0;
};

class ListScheduler {
 public:
  // REQUIRES: every rank has room for one activation of each of its stages.
  explicit ListScheduler(const Instance& instance);

  // Makespan, or kNever as soon as it cannot be below `give_up`. O(actions log ranks) for few
  // stages per rank.
  double run(const Policy& policy, double give_up = kNever);

  // Of the last run that did not give up.
  Orders orders() const;

 private:
  struct Candidate {
    double key = kNever;
    double arrival = kNever;
    Token token = {-1, Part::kForward};
    bool blocked = false;  // by memory, which a W would free

    bool exists() const { return token.stage >= 0; }
  };
  using Event = std::pair<double, int32_t>;  // time, rank

  void reset();
  void decide(int rank, double now);
  void consider(Candidate& best, Candidate& filler, const Candidate& candidate, double now) const;
  double key_of(const std::vector<double>& keys, int stage, int microbatch) const;
  bool is_admissible(int rank, int stage) const;
  int oldest_weight(int rank) const;
  void start(int rank, const Token& token, double now);

  int& done(int stage, Part part) { return counts_[slot_of({stage, part})]; }
  int done(int stage, Part part) const { return counts_[slot_of({stage, part})]; }

  const Instance& instance_;
  const Policy* policy_ = nullptr;  // of the current run
  std::vector<int> counts_;         // [stage * 3 + part] started
  std::vector<double> ends_[2];     // of F and of B, [stage * m + microbatch]; kNever: not started
  std::vector<double> free_at_;     // [rank]
  std::vector<int64_t> held_;       // [rank]
  std::vector<int> num_weights_;    // [rank] W that could run
  std::vector<std::vector<Token>> rows_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
};

}  // namespace megacore::pipeline
