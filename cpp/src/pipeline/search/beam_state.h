// Partial schedules that a beam search extends. Private.

#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "search/beam.h"
#include "search/instance.h"

namespace megacore::pipeline {

// What a partial schedule promises for a rank.
struct RankOutlook {
  double next = 0.0;          // it starts nothing before
  double lateness = 0.0;      // of its latest action to come
  double first_end = kNever;  // of what it is known to be able to run
};

struct BeamState {
  std::vector<int> counts;           // [stage * 3 + part] actions that have run
  std::vector<double> ends;          // of what the next stage has not yet run; see BeamModel
  std::vector<double> free_at;       // [rank]
  std::vector<double> left;          // [rank] work to come
  std::vector<int64_t> held;         // [rank]
  std::vector<RankOutlook> outlook;  // [rank]
  uint64_t key = 0;                  // of `counts`
  int32_t last = -1;                 // its last action, in the History of the search
};

// What the partial schedules of a search have run; they share what they have in common.
class History {
 public:
  // Returns the place of an action that follows the one at `before`, -1 for the first.
  int32_t add(int32_t before, const Token& token);
  // All actions up to the one at `last`.
  Orders orders(int32_t last, const Instance& instance) const;

 private:
  struct Entry {
    int32_t before;
    Token token;
  };
  std::vector<Entry> entries_;
};

// Knows how partial schedules of an instance grow. Time and memory of a state do not depend on what
// it has run, only on what waits.
class BeamModel {
 public:
  BeamModel(const Instance& instance, const DueTimes& due);

  BeamState empty() const;
  // Overwrites `to`, a state of this model.
  void copy(const BeamState& from, BeamState& to) const;

  // When the inputs of the next action of a stage are there; kNever if that is not yet known.
  double arrival(const BeamState& state, const Token& token) const;
  RankOutlook outlook(const BeamState& state, int rank) const;
  // The ranks whose outlook an action of this rank can change, itself too.
  const std::vector<int32_t>& neighbours(int rank) const {
    return neighbours_[static_cast<size_t>(rank)];
  }

  // How many actions of a kind and stage have run.
  int count(const BeamState& state, int stage, Part part) const {
    return state.counts[slot_of({stage, part})];
  }
  // When the F or B (I) of a microbatch ended that waits for its next stage.
  double& end_of(BeamState& state, int stage, Part part, int microbatch) const {
    return state.ends[place(stage, part, microbatch)];
  }
  double end_of(const BeamState& state, int stage, Part part, int microbatch) const {
    return state.ends[place(stage, part, microbatch)];
  }
  // What must pass after the last action of a rank.
  double tail(size_t rank) const { return tails_[rank]; }

  // Runs the next action of a stage and back; outlooks and key stay.
  struct Undo {
    double free_at;
    double left;
  };
  Undo apply(BeamState& state, const Token& token, double start) const;
  void undo(BeamState& state, const Token& token, const Undo& before) const;
  // The key after one more action.
  uint64_t key_after(const BeamState& state, const Token& token) const;

 private:
  static constexpr size_t kNone = std::numeric_limits<size_t>::max();

  // What an action waits for.
  struct Input {
    size_t slot = kNone;       // in `counts`
    size_t first_end = kNone;  // of its list in `ends`; none if the same rank runs it
    size_t rank = 0;
    double hop = 0.0;
    double delay = 0.0;  // its duration, and the hop
  };

  // Ends of F are kept for the stage after it, of B or I for the stage before it, as many at once
  // as memory lets wait.
  size_t place(int stage, Part part, int microbatch) const {
    const size_t list = static_cast<size_t>(stage) * 2 + static_cast<size_t>(part);
    return list * (mask_ + 1) + (static_cast<size_t>(microbatch) & mask_);
  }
  Input input_of(int stage, Part part) const;
  double earliest_arrival(const BeamState& state, const Token& token) const;
  double look_at_backward(const BeamState& state, int stage, RankOutlook& outlook) const;
  void look_at_forward(const BeamState& state,
                       int stage,
                       double release,
                       RankOutlook& outlook) const;

  const Instance& instance_;
  const DueTimes& due_;
  size_t mask_;  // a power of two less 1
  std::vector<double> tails_;
  std::vector<std::vector<int32_t>> neighbours_;
  std::vector<Input> inputs_;  // [stage * 3 + part]
};

}  // namespace megacore::pipeline
