#include "megacore/pipeline/auto_schedule.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "auto_list_scheduler.h"
#include "auto_order_search.h"
#include "auto_policies.h"
#include "auto_rule_search.h"
#include "auto_seeds.h"
#include "auto_unroll.h"
#include "megacore/base/check.h"
#include "megacore/pipeline/validate.h"

namespace megacore::pipeline {
namespace {

// How many actions the trials of a thorough search may schedule.
constexpr int64_t kRuleActions = 3'000'000;
constexpr int64_t kOrderActions = 6'000'000;

void require_feasible(const Instance& instance) {
  for (int rank = 0; rank < instance.num_ranks(); ++rank) {
    int64_t smallest = 0;
    for (const int32_t stage : instance.placement.stages_of(rank)) {
      smallest += instance.size[static_cast<size_t>(stage)];
    }
    const int64_t limit = instance.limit[static_cast<size_t>(rank)];
    MC_REQUIRE(limit >= smallest,
               "memory_limit is ",
               limit,
               ", but a single microbatch holds ",
               smallest,
               " on rank ",
               rank,
               "; the smallest limit that works there is ",
               smallest);
  }
}

// As many microbatches as show a start, a steady state and an end; what is left of a multiple of
// the ranks goes to them, so that steady states of any length can be repeated.
int core_size(const Instance& instance) {
  const int p = instance.num_ranks();
  const int m = instance.num_microbatches;
  return m < 3 * p ? m : 2 * p + m % p;
}

// Collects solutions and keeps the best.
class Portfolio {
 public:
  Portfolio(const BoundProblem& problem, const Instance& instance, Effort effort)
      : problem_(problem),
        instance_(instance),
        effort_(effort),
        timer_(instance),
        core_(instance.with_microbatches(core_size(instance))),
        core_timer_(core_) {
    certificate_.bound = lower_bound(problem);
    certificate_.makespan = kNever;
    BoundProblem core_problem = problem;
    core_problem.num_microbatches = core_.num_microbatches;
    core_bound_ = lower_bound(core_problem).value;
  }

  AutoSchedule run() && {
    add_named();
    if (!is_optimal()) add_rules();
    if (!is_optimal() && effort_ == Effort::kThorough) improve();
    return std::move(*this).result();
  }

 private:
  struct Trial {
    Policy policy;
    double makespan;
  };

  bool is_optimal() const { return certificate_.makespan <= certificate_.bound.value + kSameTime; }
  bool is_core_whole() const { return core_.num_microbatches == instance_.num_microbatches; }

  void add_named() {
    for (Seed& seed : named_seeds(instance_, effort_ == Effort::kThorough)) {
      if (!fits_memory(seed.orders, instance_)) continue;
      const double makespan = timer_.makespan(seed.orders);
      if (seed.same_backward) {
        certificate_.named.push_back({seed.name, seed.makespan.value_or(makespan)});
      }
      offer(std::move(seed.orders), makespan, seed.name);
    }
    std::stable_sort(certificate_.named.begin(),
                     certificate_.named.end(),
                     [](const auto& a, const auto& b) { return a.makespan < b.makespan; });
  }

  // The list scheduler under standard rules, then under rules near the best of them.
  void add_rules() {
    ListScheduler scheduler(core_);
    std::vector<Trial> trials;
    for (Policy& policy : standard_policies(core_)) {
      const double makespan = scheduler.run(policy);
      certificate_.num_scheduled += static_cast<int64_t>(core_.num_actions());
      trials.push_back({std::move(policy), makespan});
    }
    std::stable_sort(trials.begin(), trials.end(), [](const Trial& a, const Trial& b) {
      return a.makespan < b.makespan;
    });
    add_whole(trials.front().policy, "list_scheduler");
    if (effort_ == Effort::kFast) return;
    constexpr size_t kStarts = 4;
    for (size_t i = 0; i < std::min(kStarts, trials.size()) && !is_optimal(); ++i) {
      const FoundRule found =
          search_rule(scheduler,
                      core_,
                      trials[i].policy,
                      {.target = core_bound_, .max_actions = kRuleActions / kStarts, .seed = i});
      certificate_.num_scheduled += found.num_scheduled;
      add_whole(found.policy, "rule_search");
    }
  }

  // Follows a rule for all microbatches.
  void add_whole(const Policy& policy, const char* name) {
    ListScheduler scheduler(instance_);
    const double makespan = scheduler.run(policy);
    certificate_.num_scheduled += static_cast<int64_t>(instance_.num_actions());
    Orders orders = scheduler.orders();
    offer(std::move(orders), makespan, name);
    if (is_core_whole()) return;
    ListScheduler core_scheduler(core_);
    core_scheduler.run(policy);
    orders = core_scheduler.orders();
    offer_unrolled(orders);
  }

  void offer_unrolled(const Orders& orders) {
    core_timer_.makespan(orders);
    std::optional<Orders> longer = unroll(orders, core_timer_.starts(), core_, instance_);
    if (!longer) return;
    const double makespan = timer_.makespan(*longer);
    offer(std::move(*longer), makespan, "cyclic_search");
  }

  void improve() {
    FoundOrders found = search_orders(
        timer_,
        instance_,
        best_,
        {.target = certificate_.bound.value, .max_actions = kOrderActions, .seed = 1});
    certificate_.num_scheduled += found.num_scheduled;
    offer(std::move(found.orders), found.makespan, certificate_.winner + " + local_search");
  }

  AutoSchedule result() && {
    certificate_.is_optimal = is_optimal();
    Schedule schedule = schedule_of(best_, instance_, "auto");
    validate(schedule);
    MC_INVARIANT(fits_memory(best_, instance_), "the schedule holds more than the limit");
    certificate_.peak_memory = peak_memory(best_, instance_);
    return {std::move(schedule), std::move(certificate_)};
  }

  void offer(Orders orders, double makespan, std::string winner) {
    if (makespan >= certificate_.makespan - kSameTime) return;
    best_ = std::move(orders);
    certificate_.makespan = makespan;
    certificate_.winner = std::move(winner);
  }

  const BoundProblem& problem_;
  const Instance& instance_;
  Effort effort_;
  OrderTimer timer_;
  Instance core_;  // with fewer microbatches
  OrderTimer core_timer_;
  double core_bound_ = 0.0;
  Orders best_;
  Certificate certificate_;
};

}  // namespace

AutoSchedule auto_schedule(const BoundProblem& problem, Effort effort) {
  MC_REQUIRE(problem.placement.num_chains() == 1,
             "the placement has ",
             problem.placement.num_chains(),
             " chains; auto schedules place one, in a loop or a V");
  const Instance instance = make_instance(problem);
  require_feasible(instance);
  return Portfolio(problem, instance, effort).run();
}

}  // namespace megacore::pipeline
