#include "search/layer_limits.h"

#include <algorithm>

namespace megacore::pipeline {

LayerLimits::LayerLimits(const Instance& instance, const BeamModel& model, const DueTimes& latest)
    : instance_(instance),
      model_(model),
      latest_(latest),
      forward_(static_cast<size_t>(instance.num_stages())),
      backward_(forward_) {
  for (int rank = 0; rank < instance.num_ranks(); ++rank) {
    double shortest = kNever;
    std::vector<Job> jobs;
    for (const int32_t stage : instance.placement.stages_of(rank)) {
      const auto s = static_cast<size_t>(stage);
      const double forward = instance.forward[s];
      const double backward = instance.backward[s];
      shortest = std::min({shortest, forward, backward});
      for (int k = 0; k < instance.num_microbatches; ++k) {
        const size_t at = instance.at(stage, k);
        jobs.push_back({{stage, Part::kForward}, k, forward, latest.forward[at] + forward});
        jobs.push_back({{stage, Part::kBackward}, k, backward, latest.backward[at] + backward});
      }
    }
    std::stable_sort(jobs.begin(), jobs.end(),
                     [](const Job& a, const Job& b) { return a.deadline < b.deadline; });
    shortest_.push_back(shortest);
    jobs_.push_back(std::move(jobs));
  }
}

bool LayerLimits::tighten(BeamState& state, uint64_t deferred, const BeamState* parent) {
  if (!can_become_full(state, deferred)) return false;
  constexpr int kRounds = 2;
  for (int round = 0; round < kRounds; ++round) {
    estimate_forwards(state, deferred);
    estimate_backwards(state);
    wait_for_room(state);
    if (!lift_ranks(state)) break;
  }
  if (!starts_in_time(state)) return false;
  for (int stage = 0; stage + 1 < instance_.num_stages(); ++stage) {
    if (!lift_waiting(state, {stage + 1, Part::kForward})) return false;
    if (!lift_waiting(state, {stage, Part::kBackward})) return false;
  }
  for (int rank = 0; rank < instance_.num_ranks(); ++rank) {
    const auto r = static_cast<size_t>(rank);
    if (parent != nullptr && parent->free_at[r] == state.free_at[r]) continue;
    if (!ends_in_time(state, rank)) return false;
  }
  return true;
}

uint64_t LayerLimits::still_deferred(const BeamState& state, uint64_t deferred, int rank) const {
  const auto r = static_cast<size_t>(rank);
  for (const int32_t stage : instance_.placement.stages_of(rank)) {
    if (state.held[r] + instance_.size[static_cast<size_t>(stage)] <= instance_.limit[r]) continue;
    deferred &= ~(uint64_t{1} << static_cast<unsigned>(stage));
  }
  return deferred;
}

// Whether forwards of other stages can take the room for each deferred one, without it.
bool LayerLimits::can_become_full(const BeamState& state, uint64_t deferred) const {
  if (deferred == 0) return true;
  for (int stage = 0; stage < instance_.num_stages(); ++stage) {
    if (!is_deferred(deferred, stage)) continue;
    const int rank = instance_.placement.rank_of(stage);
    const auto r = static_cast<size_t>(rank);
    const int forwards = model_.count(state, stage, Part::kForward);
    int64_t most = state.held[r] + instance_.size[static_cast<size_t>(stage)];
    for (const int32_t other : instance_.placement.stages_of(rank)) {
      if (other == stage) continue;
      const int end = other > stage ? forwards : instance_.num_microbatches;
      most += instance_.size[static_cast<size_t>(other)] *
              (end - model_.count(state, other, Part::kForward));
    }
    if (most <= instance_.limit[r]) return false;
  }
  return true;
}

void LayerLimits::estimate_forwards(const BeamState& state, uint64_t deferred) {
  for (int stage = 0; stage < instance_.num_stages(); ++stage) {
    const auto s = static_cast<size_t>(stage);
    forward_[s] = kNever;
    if (model_.count(state, stage, Part::kForward) == instance_.num_microbatches) continue;
    double arrival = model_.arrival(state, {stage, Part::kForward});
    // Then the stage before has this very microbatch next.
    if (arrival == kNever) {
      arrival = forward_[s - 1] + instance_.forward[s - 1] + instance_.hop[s];
    }
    const auto rank = static_cast<size_t>(instance_.placement.rank_of(stage));
    const bool waits = is_deferred(deferred, stage);
    const double free_at = state.free_at[rank] + (waits ? shortest_[rank] : 0.0);
    forward_[s] = std::max(free_at, arrival);
  }
}

void LayerLimits::estimate_backwards(const BeamState& state) {
  for (int stage = instance_.num_stages() - 1; stage >= 0; --stage) {
    const auto s = static_cast<size_t>(stage);
    const int k = model_.count(state, stage, Part::kBackward);
    backward_[s] = kNever;
    if (k == instance_.num_microbatches) continue;
    double arrival = model_.arrival(state, {stage, Part::kBackward});
    if (arrival == kNever) {
      const bool is_last = stage + 1 == instance_.num_stages();
      const bool has_run = model_.count(state, stage, Part::kForward) > k;
      arrival = has_run ? 0.0 : forward_[s] + instance_.forward[s];
      if (!is_last && model_.count(state, stage + 1, Part::kBackward) == k) {
        arrival =
            std::max(arrival, backward_[s + 1] + instance_.backward[s + 1] + instance_.hop[s + 1]);
      }
    }
    const auto rank = static_cast<size_t>(instance_.placement.rank_of(stage));
    backward_[s] = std::max(state.free_at[rank], arrival);
  }
}

// A forward without room comes after a backward of its rank.
void LayerLimits::wait_for_room(const BeamState& state) {
  for (int rank = 0; rank < instance_.num_ranks(); ++rank) {
    const auto r = static_cast<size_t>(rank);
    double release = kNever;
    for (const int32_t stage : instance_.placement.stages_of(rank)) {
      const auto s = static_cast<size_t>(stage);
      release = std::min(release, backward_[s] + instance_.backward[s]);
    }
    for (const int32_t stage : instance_.placement.stages_of(rank)) {
      const auto s = static_cast<size_t>(stage);
      if (forward_[s] == kNever || state.held[r] + instance_.size[s] <= instance_.limit[r]) {
        continue;
      }
      forward_[s] = std::max(forward_[s], release);
    }
  }
}

// Returns whether a rank has become free later.
bool LayerLimits::lift_ranks(BeamState& state) const {
  bool is_later = false;
  for (int rank = 0; rank < instance_.num_ranks(); ++rank) {
    double first = kNever;
    for (const int32_t stage : instance_.placement.stages_of(rank)) {
      const auto s = static_cast<size_t>(stage);
      first = std::min({first, forward_[s], backward_[s]});
    }
    double& free_at = state.free_at[static_cast<size_t>(rank)];
    if (first == kNever || first <= free_at) continue;
    free_at = first;
    is_later = true;
  }
  return is_later;
}

bool LayerLimits::starts_in_time(const BeamState& state) const {
  const auto is_late = [&](int stage, Part part, double start, const std::vector<double>& latest) {
    if (start == kNever) return false;
    return start > latest[instance_.at(stage, model_.count(state, stage, part))] + kSameTime;
  };
  for (int stage = 0; stage < instance_.num_stages(); ++stage) {
    const auto s = static_cast<size_t>(stage);
    if (is_late(stage, Part::kForward, forward_[s], latest_.forward)) return false;
    if (is_late(stage, Part::kBackward, backward_[s], latest_.backward)) return false;
  }
  return true;
}

// What waits for this action of a stage is run one after another, from when its rank is free.
bool LayerLimits::lift_waiting(BeamState& state, const Token& token) const {
  const bool is_forward = token.part == Part::kForward;
  const int from = is_forward ? token.stage - 1 : token.stage + 1;
  const double hop = instance_.hop[static_cast<size_t>(std::max(from, token.stage))];
  const auto rank = static_cast<size_t>(instance_.placement.rank_of(token.stage));
  const std::vector<double>& latest = is_forward ? latest_.forward : latest_.backward;
  const int end = model_.count(state, from, token.part);
  double start = state.free_at[rank];
  for (int k = model_.count(state, token.stage, token.part); k < end; ++k) {
    double& sent = model_.end_of(state, from, token.part, k);
    sent = std::max(sent, start - hop);
    if (sent + hop > latest[instance_.at(token.stage, k)] + kSameTime) return false;
    start += instance_.duration(token);
  }
  return true;
}

// Without waits and in the order of deadlines, which is the best for all of them (Jackson 1955).
bool LayerLimits::ends_in_time(const BeamState& state, int rank) const {
  double time = state.free_at[static_cast<size_t>(rank)];
  for (const Job& job : jobs_[static_cast<size_t>(rank)]) {
    if (job.microbatch < model_.count(state, job.token.stage, job.token.part)) continue;
    time += job.duration;
    if (time > job.deadline + kSameTime) return false;
  }
  return true;
}

bool LayerLimits::waits_no_longer(const BeamState& one,
                                  const BeamState& other,
                                  double rounding) const {
  const auto compare = [&](int stage, Part part, int reader) {
    const int end = model_.count(one, stage, part);
    for (int k = model_.count(one, reader, part); k < end; ++k) {
      if (model_.end_of(one, stage, part, k) > model_.end_of(other, stage, part, k) + rounding) {
        return false;
      }
    }
    return true;
  };
  for (int stage = 0; stage + 1 < instance_.num_stages(); ++stage) {
    if (!compare(stage, Part::kForward, stage + 1)) return false;
    if (!compare(stage + 1, Part::kBackward, stage)) return false;
  }
  return true;
}

}  // namespace megacore::pipeline
