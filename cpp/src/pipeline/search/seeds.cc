#include "search/seeds.h"

#include <stdexcept>
#include <utility>

#include "megacore/pipeline/schedules/schedule_catalog.h"

namespace megacore::pipeline {
namespace {

// Options of one named schedule beyond its defaults.
std::vector<ScheduleRequest> requests_of(const ScheduleInfo& info,
                                         const Instance& instance,
                                         bool variants) {
  ScheduleRequest plain{.num_ranks = instance.num_ranks(),
                        .num_microbatches = instance.num_microbatches};
  if (info.num_chunks == 0) plain.num_chunks = instance.placement.num_chunks();
  std::vector<ScheduleRequest> requests = {plain};
  if (info.takes_warmup_multiplier) {
    requests.push_back(plain);
    requests.back().warmup_multiplier = 1;
  }
  if (!variants || !info.takes_group_size || instance.placement.num_chunks() == 1) return requests;
  const size_t num_plain = requests.size();
  for (const int group :
       {instance.num_ranks(), instance.num_ranks() + 1, 2 * instance.num_ranks()}) {
    for (size_t i = 0; i < num_plain; ++i) {
      requests.push_back(requests[i]);
      requests.back().group_size = group;
    }
  }
  return requests;
}

std::string name_of(const ScheduleInfo& info, const ScheduleRequest& request) {
  std::string name(info.name);
  if (request.group_size) name += " group_size=" + std::to_string(*request.group_size);
  if (request.warmup_multiplier) {
    name += " warmup_multiplier=" + std::to_string(*request.warmup_multiplier);
  }
  return name;
}

// Whether all stages run all actions of a kind in the order of microbatches, none in pairs.
bool keeps_order(const Schedule& schedule) {
  std::vector<int> next(static_cast<size_t>(schedule.num_stages()) * kKindText.size(), 0);
  for (const Action& action : schedule.actions) {
    const size_t slot =
        static_cast<size_t>(action.stage) * kKindText.size() + static_cast<size_t>(action.kind);
    if (action.microbatch != next[slot]++) return false;
  }
  return schedule.overlaps.empty();
}

}  // namespace

std::vector<Seed> named_seeds(const Instance& instance, bool variants) {
  std::vector<Seed> seeds;
  for (const ScheduleInfo& info : schedule_catalog()) {
    const bool same_backward = info.splits_backward == instance.split;
    if (info.placement == PlacementKind::kBidirectional) continue;
    if (info.splits_backward && !instance.split) continue;
    const int num_chunks = instance.placement.num_chunks();
    if (info.num_chunks != 0 && info.num_chunks != num_chunks) continue;
    for (const ScheduleRequest& request : requests_of(info, instance, variants)) {
      try {
        const Schedule schedule = info.generate(request);
        if (schedule.placement != instance.placement) break;
        Seed seed{name_of(info, request), orders_of(schedule, instance), same_backward};
        if (same_backward && !keeps_order(schedule)) {
          seed.makespan = simulate(schedule, instance.costs).makespan;
        }
        seeds.push_back(std::move(seed));
      } catch (const std::invalid_argument&) {
        // Not a schedule for these sizes.
      }
    }
  }
  return seeds;
}

}  // namespace megacore::pipeline
