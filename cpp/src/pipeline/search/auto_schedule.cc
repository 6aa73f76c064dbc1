#include "megacore/pipeline/search/auto_schedule.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "bounds/deadline_bound.h"
#include "megacore/base/check.h"
#include "megacore/pipeline/validate.h"
#include "search/exact_search.h"
#include "search/list_scheduler.h"
#include "search/policies.h"
#include "search/rule_search.h"
#include "search/seeds.h"
#include "search/unroll.h"

namespace megacore::pipeline {
namespace {

// How many actions the trials of a thorough search may schedule.
constexpr int64_t kRuleActions = 3'000'000;
// Partial solutions that an exact search looks at, before and after all others have tried.
constexpr int64_t kFirstNodes = 5'000;
constexpr int64_t kNodes = 300'000;

void require_feasible(const Instance& instance) {
  for (int rank = 0; rank < instance.num_ranks(); ++rank) {
    int64_t smallest = 0;
    for (const int32_t stage : instance.placement.stages_of(rank)) {
      smallest += instance.size[static_cast<size_t>(stage)];
    }
    const int64_t limit = instance.limit[static_cast<size_t>(rank)];
    MC_REQUIRE(limit >= smallest,
               "memory_limit is {}, but a single microbatch holds {} on rank {}; the smallest "
               "limit that works there is {}",
               limit, smallest, rank, smallest);
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
        core_timer_(core_),
        core_scheduler_(core_) {
    certificate_.bound = lower_bound(problem);
    certificate_.makespan = kNever;
    BoundProblem core_problem = problem;
    core_problem.num_microbatches = core_.num_microbatches;
    core_bound_ = lower_bound(core_problem).value;
  }

  AutoSchedule run() && {
    add_named();
    const bool thorough = effort_ == Effort::kThorough;
    if (!is_optimal()) add_standard_rules();
    if (!is_optimal()) tighten();
    if (!is_optimal()) exhaust(kFirstNodes);
    if (!is_optimal() && thorough) search_rules();
    if (!is_optimal() && thorough) tighten();
    if (!is_optimal() && thorough) exhaust(kNodes);
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
    std::stable_sort(certificate_.named.begin(), certificate_.named.end(),
                     [](const auto& a, const auto& b) { return a.makespan < b.makespan; });
  }

  void tighten() {
    certificate_.bound = tightened(certificate_.bound, problem_, certificate_.makespan);
  }

  void try_on_core(Policy policy) {
    const double makespan = core_scheduler_.run(policy);
    certificate_.num_scheduled += static_cast<int64_t>(core_.num_actions());
    trials_.push_back({std::move(policy), makespan});
  }

  void sort_trials() {
    std::stable_sort(trials_.begin(), trials_.end(),
                     [](const Trial& a, const Trial& b) { return a.makespan < b.makespan; });
  }

  void add_standard_rules() {
    for (Policy& policy : standard_policies(core_)) try_on_core(std::move(policy));
    add_best_rules();
  }

  // Few microbatches do not tell which rule is best for all. Thorough: tries all rules.
  void add_best_rules() {
    sort_trials();
    const size_t count = effort_ == Effort::kThorough ? trials_.size() : 1;
    for (size_t i = 0; i < count && !is_optimal(); ++i) {
      add_whole(trials_[i].policy, "list_scheduler");
    }
  }

  // Rules near the best ones.
  void search_rules() {
    constexpr size_t kStarts = 4;
    for (size_t i = 0; i < std::min(kStarts, trials_.size()) && !is_optimal(); ++i) {
      const FoundRule found =
          search_rule(core_scheduler_, core_, trials_[i].policy,
                      {.target = core_bound_, .max_actions = kRuleActions / kStarts, .seed = i});
      certificate_.num_scheduled += found.num_scheduled;
      add_whole(found.policy, "rule_search");
    }
  }

  // Follows a rule for all microbatches; and for few, whose steady state is then repeated.
  void add_whole(const Policy& policy, const char* name) {
    const double core_makespan = core_scheduler_.run(policy);
    offer_core(core_scheduler_.orders(), core_makespan, name);
    if (is_core_whole()) return;
    ListScheduler scheduler(instance_);
    const double makespan = scheduler.run(policy);
    certificate_.num_scheduled += static_cast<int64_t>(instance_.num_actions());
    offer(scheduler.orders(), makespan, name);
  }

  void offer_core(Orders orders, double core_makespan, const std::string& name) {
    if (is_core_whole()) return offer(std::move(orders), core_makespan, name);
    core_timer_.makespan(orders);
    std::optional<Orders> longer = unroll(orders, core_timer_.starts(), core_, instance_);
    if (!longer) return;
    // Not in one call with the move: compilers differ in which argument they evaluate first.
    const double makespan = timer_.makespan(*longer);
    offer(std::move(*longer), makespan, "cyclic_search, " + name);
  }

  // Looks at all orders, if they are few enough.
  void exhaust(int64_t max_nodes) {
    constexpr size_t kMostActions = 200;
    if (instance_.num_actions() > kMostActions || !can_search_exactly(instance_)) return;
    ExactResult found = search_exactly(instance_, {.below = certificate_.makespan,
                                                   .target = certificate_.bound.value,
                                                   .max_nodes = max_nodes});
    certificate_.num_scheduled += found.num_nodes;
    if (found.orders) offer(std::move(*found.orders), found.makespan, "exact_search");
    if (found.is_complete && !is_optimal()) raise_bound(certificate_.makespan);
  }

  void raise_bound(double value) {
    certificate_.bound.value = value;
    certificate_.bound.reason = BoundReason::kExhaustion;
    certificate_.bound.by_reason[static_cast<size_t>(BoundReason::kExhaustion)] = value;
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
  ListScheduler core_scheduler_;
  std::vector<Trial> trials_;  // rules on the core, the best first
  double core_bound_ = 0.0;
  Orders best_;
  Certificate certificate_;
};

}  // namespace

AutoSchedule auto_schedule(const BoundProblem& problem, Effort effort) {
  MC_REQUIRE(problem.placement.num_chains() == 1,
             "the placement has {} chains; auto schedules place one, in a loop or a V",
             problem.placement.num_chains());
  require_sound(problem);
  const Instance instance = make_instance(problem);
  require_feasible(instance);
  return Portfolio(problem, instance, effort).run();
}

}  // namespace megacore::pipeline
