#include "megacore/pipeline/bounds/lower_bound.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "bounds/chain_bounds.h"
#include "bounds/deadline_bound.h"
#include "bounds/one_machine.h"
#include "megacore/base/check.h"

namespace megacore::pipeline {
namespace {

// What is known of one rank. Lists over all its stages ascend; entry k of a list of heads belongs
// to the action with k others of its kind before it, of tails, after it. A release is what frees an
// activation: W, or a fused B.
class RankBounds {
 public:
  RankBounds(const BoundProblem& problem, const ChainBounds& chains, int rank)
      : chains_(chains), split_(problem.split_backward) {
    const std::vector<int64_t>& sizes = problem.activation_size;
    for (const int32_t stage : problem.placement.stages_of(rank)) {
      const size_t entry = sizes.size() <= 1 ? 0 : static_cast<size_t>(stage);
      add_stage(stage, sizes.empty() ? 1.0 : static_cast<double>(sizes[entry]));
    }
    for (auto* list : {&forward_heads_, &forward_tails_, &release_heads_, &release_tails_}) {
      std::sort(list->begin(), list->end());
    }
    num_forwards_ = forward_heads_.size();
    limit_ = num_forwards_;
    const std::vector<int64_t>& limits = problem.memory_limit;
    if (limits.empty()) return;
    room_ = static_cast<double>(limits[limits.size() == 1 ? 0 : static_cast<size_t>(rank)]);
    // As many as fit if all were as small as the smallest.
    const auto count = static_cast<size_t>(room_ / smallest_size_);
    limit_ = std::clamp<size_t>(count, 1, num_forwards_);
    if (limit_ < num_forwards_) apply_memory();
  }

  double work() const {
    double head = kInfinity;
    double tail = kInfinity;
    double work = 0.0;
    for (const OneStage& own : stages_) {
      head = std::min(head, chains_.head(own.stage));
      // A weight gradient can be the last action of a rank.
      tail = std::min(tail, split_ ? 0.0 : chains_.tail(own.stage));
      work += own.count() * (chains_.forward(own.stage) + chains_.backward(own.stage) +
                             chains_.weight(own.stage));
    }
    return head + work + tail;
  }

  // At most min(M, F so far, releases to come) activations are held at any time, which leaves ramps
  // of the area M x makespan unused.
  double memory_area() const {
    double area = 0.0;
    double sized_area = 0.0;
    for (const OneStage& own : stages_) {
      area += own.count() * chains_.life(own.stage);
      sized_area += own.count() * own.size * chains_.life(own.stage);
    }
    const auto limit = static_cast<double>(limit_);
    double start = forward_heads_.front();
    double end = release_tails_.front();
    const double plain = start + std::max(area / limit, sized_area / room_) + end;
    double ramps = start + end;
    for (size_t i = 1; i < limit_; ++i) {
      start = std::max(forward_heads_[i], start + shortest_forward_);
      end = std::max(release_tails_[i], end + shortest_release_);
      ramps += start + end;
    }
    // Where the ramps would overlap, their areas must not count twice.
    return std::max(plain, std::min((area + ramps) / limit, start + end));
  }

  // The actions as jobs of one machine: every stage by itself.
  std::vector<JobClass> jobs_by_stage() const {
    std::vector<JobClass> jobs;
    for (const OneStage& own : stages_) {
      const StageBounds& bounds = own.bounds;
      jobs.push_back({chains_.forward(own.stage), bounds.forward_heads, bounds.forward_tails});
      jobs.push_back({chains_.backward(own.stage), bounds.backward_heads, bounds.backward_tails});
      if (split_) jobs.push_back({chains_.weight(own.stage), bounds.weight_heads, {}});
    }
    return jobs;
  }

  // The same with all F and all releases of the rank in order of time, because memory binds those.
  std::vector<JobClass> jobs_with_memory() const {
    std::vector<JobClass> jobs = {{shortest_forward_, forward_heads_, forward_tails_},
                                  {shortest_release_, release_heads_, release_tails_}};
    for (const OneStage& own : stages_) {
      if (!split_) break;
      jobs.push_back(
          {chains_.backward(own.stage), own.bounds.backward_heads, own.bounds.backward_tails});
    }
    return jobs;
  }

 private:
  struct OneStage {
    int stage;
    double size;  // of an activation
    StageBounds bounds;

    double count() const { return static_cast<double>(bounds.forward_heads.size()); }
  };

  void add_stage(int stage, double size) {
    stages_.push_back({stage, size, chains_.of_stage(stage)});
    smallest_size_ = std::min(smallest_size_, size);
    const StageBounds& bounds = stages_.back().bounds;
    const auto append = [](std::vector<double>& list, const std::vector<double>& more) {
      list.insert(list.end(), more.begin(), more.end());
    };
    append(forward_heads_, bounds.forward_heads);
    append(forward_tails_, bounds.forward_tails);
    append(release_heads_, split_ ? bounds.weight_heads : bounds.backward_heads);
    append(release_tails_,
           split_ ? std::vector<double>(bounds.weight_heads.size(), 0.0) : bounds.backward_tails);

    const double forward = chains_.forward(stage);
    const double release = split_ ? chains_.weight(stage) : chains_.backward(stage);
    shortest_forward_ = std::min(shortest_forward_, forward);
    shortest_release_ = std::min(shortest_release_, release);
    start_to_release_ = std::min(start_to_release_, chains_.life(stage) - release);
    end_to_end_ = std::min(end_to_end_, chains_.life(stage) - forward);
  }

  // With M activations, the k-th F starts after the (k-M)-th release, which in turn ends a lifetime
  // after the (k-M)-th F starts; and backwards in time the same.
  void apply_memory() {
    for (size_t k = 0; k < num_forwards_; ++k) {
      double& forward_head = forward_heads_[k];
      double& release_tail = release_tails_[k];
      if (k >= limit_) {
        forward_head = std::max(forward_head, release_heads_[k - limit_] + shortest_release_);
        release_tail = std::max(release_tail, forward_tails_[k - limit_] + shortest_forward_);
      }
      release_heads_[k] = std::max(release_heads_[k], forward_head + start_to_release_);
      forward_tails_[k] = std::max(forward_tails_[k], release_tail + end_to_end_);
    }
  }

  const ChainBounds& chains_;
  bool split_;
  std::vector<OneStage> stages_;
  size_t num_forwards_ = 0;  // on this rank
  size_t limit_ = 0;         // M, at most num_forwards_
  double room_ = kInfinity;  // the limit in the unit of sizes
  double smallest_size_ = kInfinity;
  double shortest_forward_ = kInfinity;
  double shortest_release_ = kInfinity;
  double start_to_release_ = kInfinity;  // shortest from the start of F to that of its release
  double end_to_end_ = kInfinity;        // shortest from the end of F to that of its release
  std::vector<double> forward_heads_;
  std::vector<double> forward_tails_;
  std::vector<double> release_heads_;
  std::vector<double> release_tails_;
};

}  // namespace

std::string_view name_of(BoundReason reason) {
  constexpr std::array<std::string_view, kNumBoundReasons> kNames = {
      "critical_path", "rank_work", "rank_queue", "memory_area",
      "delivery",      "deadlines", "exhaustion"};
  return kNames[static_cast<size_t>(reason)];
}

std::string_view to_text(BoundReason reason) {
  constexpr std::array<std::string_view, kNumBoundReasons> kTexts = {
      "one microbatch through all stages and back",
      "the work of one rank, from its first start to its shortest tail",
      "the queue of one rank: actions arrive too late",
      "the memory of one rank: activations live too long",
      "the queue of one rank: actions arrive too late and lead on too far",
      "with an earlier end some action cannot run between what comes before and after it",
      "a search that left no order out"};
  return kTexts[static_cast<size_t>(reason)];
}

void require_sound(const BoundProblem& problem) {
  MC_REQUIRE(problem.num_microbatches >= 1, "num_microbatches must be at least 1, got {}",
             problem.num_microbatches);
  MC_REQUIRE(problem.costs.overlap == 0.0,
             "cost 'overlap' is {}; the bounds hold without overlap only", problem.costs.overlap);
  const size_t num_limits = problem.memory_limit.size();
  const int num_ranks = problem.placement.num_ranks();
  MC_REQUIRE(num_limits <= 1 || num_limits == static_cast<size_t>(num_ranks),
             "memory_limit has {} entries; give one for all ranks or {}, one per rank", num_limits,
             num_ranks);
  const size_t num_sizes = problem.activation_size.size();
  const int num_stages = problem.placement.num_stages();
  MC_REQUIRE(num_sizes <= 1 || num_sizes == static_cast<size_t>(num_stages),
             "activation_size has {} entries; give one for all stages or {}, one per stage",
             num_sizes, num_stages);
  // All activations together must be countable.
  const int64_t largest =
      std::numeric_limits<int64_t>::max() / 8 / num_stages / problem.num_microbatches;
  for (const int64_t size : problem.activation_size) {
    MC_REQUIRE(size >= 1, "activation_size must be at least 1, got {}", size);
    MC_REQUIRE(size <= largest,
               "activation_size is {}; with these stages and microbatches it can be {} at most, so "
               "choose a larger unit",
               size, largest);
  }
}

LowerBound lower_bound(const BoundProblem& problem) {
  require_sound(problem);
  for (const int64_t limit : problem.memory_limit) {
    MC_REQUIRE(limit >= 1, "memory_limit is {}; a rank needs room for 1 activation", limit);
  }
  const ChainBounds chains(problem.placement,
                           stage_costs(problem.costs, problem.placement.num_stages()),
                           problem.num_microbatches, problem.split_backward);
  LowerBound bound;
  const auto raise = [&](BoundReason reason, double value) {
    double& best = bound.by_reason[static_cast<size_t>(reason)];
    best = std::max(best, value);
  };
  raise(BoundReason::kCriticalPath, chains.critical_path());
  for (int rank = 0; rank < problem.placement.num_ranks(); ++rank) {
    const RankBounds own(problem, chains, rank);
    raise(BoundReason::kRankWork, own.work());
    raise(BoundReason::kMemoryArea, own.memory_area());
    for (const std::vector<JobClass>& jobs : {own.jobs_by_stage(), own.jobs_with_memory()}) {
      raise(BoundReason::kRankQueue, queue_makespan(jobs));
      raise(BoundReason::kDelivery, delivery_makespan(jobs));
    }
  }
  for (size_t reason = 0; reason < kNumBoundReasons; ++reason) {
    if (bound.by_reason[reason] <= bound.value) continue;
    bound.value = bound.by_reason[reason];
    bound.reason = static_cast<BoundReason>(reason);
  }
  return bound;
}

LowerBound tightened(LowerBound bound, const BoundProblem& problem, double makespan) {
  // Windows to narrow, a tenth of a second or two; of more actions than that they are too few.
  constexpr int64_t kSteps = 4'000'000;
  constexpr int64_t kMostActions = 50'000;
  const int64_t num_actions = int64_t{problem.placement.num_stages()} * problem.num_microbatches *
                              (problem.split_backward ? 3 : 2);
  if (problem.placement.num_chains() > 1 || num_actions > kMostActions) return bound;
  if (bound.value >= makespan) return bound;
  const double value = deadline_bound(problem, bound.value, makespan, kSteps);
  if (value <= bound.value) return bound;
  bound.value = value;
  bound.reason = BoundReason::kDeadlines;
  bound.by_reason[static_cast<size_t>(BoundReason::kDeadlines)] = value;
  return bound;
}

BoundProblem problem_of(const Schedule& schedule, const Costs& costs) {
  MC_REQUIRE(!schedule.forward_only, "schedule '{}' is forward-only; the bounds are for training",
             schedule.name);
  const bool split =
      std::any_of(schedule.actions.begin(), schedule.actions.end(),
                  [](const Action& action) { return action.kind == ActionKind::kBackwardWeight; });
  return {.placement = schedule.placement,
          .num_microbatches = schedule.num_microbatches,
          .costs = costs,
          .split_backward = split,
          .memory_limit = simulate(schedule, costs).peak_in_flight};
}

}  // namespace megacore::pipeline
