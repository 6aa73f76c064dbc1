// A scheduling problem and its solutions, flattened for search. Private.
//
// All microbatches cost the same, so an order of actions need not name them: the k-th F of a stage
// can take microbatch k, and so the k-th I and W. No order gets slower or needs more memory by that
// relabelling. A solution is therefore a list of (stage, kind) tokens per rank.

#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "megacore/pipeline/bounds/lower_bound.h"
#include "megacore/pipeline/schedule.h"

namespace megacore::pipeline {

inline constexpr double kNever = std::numeric_limits<double>::infinity();
// Times that differ by rounding only are the same.
inline constexpr double kSameTime = 1e-9;

enum class Part : uint8_t { kForward, kBackward, kWeight };  // kBackward: B, or I when split

struct Token {
  int32_t stage;
  Part part;

  friend bool operator==(const Token&, const Token&) = default;
};

// Index of a kind of action in lists with three entries per stage.
inline size_t slot_of(const Token& token) {
  return static_cast<size_t>(token.stage) * 3 + static_cast<size_t>(token.part);
}

// What every rank runs, rank after rank; rank r owns tokens [offsets[r], offsets[r+1]).
struct Orders {
  std::vector<Token> tokens = {};
  std::vector<size_t> offsets = {0};

  friend bool operator==(const Orders&, const Orders&) = default;
};

struct Instance {
  Placement placement;
  Costs costs;  // as given; those below are per stage
  int num_microbatches;
  bool split;
  std::vector<double> forward;   // [num_stages] duration of F
  std::vector<double> backward;  // of B, or I
  std::vector<double> weight;    // of W; 0 with a fused backward
  std::vector<double> hop;       // latency between a stage and the one before it
  std::vector<int64_t> size;     // of an activation of the stage
  std::vector<int64_t> limit;    // [num_ranks] sum of sizes that a rank may hold

  int num_ranks() const { return placement.num_ranks(); }
  int num_stages() const { return placement.num_stages(); }
  size_t num_actions() const {
    return static_cast<size_t>(num_stages()) * static_cast<size_t>(num_microbatches) *
           (split ? 3 : 2);
  }
  size_t at(int stage, int microbatch) const {
    return static_cast<size_t>(stage) * static_cast<size_t>(num_microbatches) +
           static_cast<size_t>(microbatch);
  }
  double duration(const Token& token) const {
    const auto stage = static_cast<size_t>(token.stage);
    return token.part == Part::kForward    ? forward[stage]
           : token.part == Part::kBackward ? backward[stage]
                                           : weight[stage];
  }
  // The last action that reads the activation of a forward.
  Part release() const { return split ? Part::kWeight : Part::kBackward; }
  // What an action adds to the activations that its rank holds; less than 0 if it frees one.
  int64_t held_by(const Token& token) const {
    const int64_t activation = size[static_cast<size_t>(token.stage)];
    return token.part == Part::kForward ? activation : token.part == release() ? -activation : 0;
  }
  // Work of a rank per microbatch.
  double work(int rank) const;
  // The same problem with another number of microbatches.
  Instance with_microbatches(int count) const;
};

// REQUIRES: lower_bound(problem) does not throw; one chain.
Instance make_instance(const BoundProblem& problem);

// The tokens of a schedule for training; a fused backward becomes I and W when the instance splits.
// Pairs that overlap come apart.
Orders orders_of(const Schedule& schedule, const Instance& instance);
Schedule schedule_of(const Orders& orders, const Instance& instance, std::string name);

// [num_ranks] the most that each rank holds at once.
std::vector<int64_t> peak_memory(const Orders& orders, const Instance& instance);
// Whether no rank ever holds more than its limit.
bool fits_memory(const Orders& orders, const Instance& instance);

// Whether the next F of a stage fits the memory of its rank, and leaves room there for every
// microbatch that is not yet forward through the stages of the rank, after all older ones have
// gone: then every microbatch that has started can still end. `counts` [stage * 3 + part] says how
// many actions have run, `held` what the rank holds. As microbatches keep their order on every
// stage, no valid order ever breaks this rule.
bool leaves_room(const Instance& instance, const std::vector<int>& counts, int64_t held, int stage);

// Times orders, many of them for one instance. Not thread-safe.
class OrderTimer {
 public:
  explicit OrderTimer(const Instance& instance);

  // Makespan, or kNever for a deadlock. O(actions).
  double makespan(const Orders& orders);

  // Of the last call of makespan(): start of each token.
  const std::vector<double>& starts() const { return starts_; }

 private:
  void run_rank(const Orders& orders, int rank);
  double ready_time(const Token& token, int microbatch) const;

  const Instance& instance_;
  std::vector<double> ends_[2];   // of F and of B, [stage * m + microbatch]
  std::vector<int> counts_;       // [stage * 3 + part]
  std::vector<size_t> position_;  // [rank]
  std::vector<double> rank_time_;
  std::vector<int> blocked_on_;  // [rank] index of a value, or -1
  std::vector<int32_t> ready_;
  std::vector<double> starts_;
};

}  // namespace megacore::pipeline
