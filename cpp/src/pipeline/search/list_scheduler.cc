#include "search/list_scheduler.h"

#include <algorithm>

#include "megacore/base/check.h"

namespace megacore::pipeline {

ListScheduler::ListScheduler(const Instance& instance)
    : instance_(instance),
      counts_(static_cast<size_t>(instance.num_stages()) * 3),
      free_at_(static_cast<size_t>(instance.num_ranks())),
      held_(free_at_.size()),
      num_weights_(free_at_.size()),
      rows_(free_at_.size()) {
  for (auto& ends : ends_) {
    ends.resize(static_cast<size_t>(instance.num_stages()) *
                static_cast<size_t>(instance.num_microbatches));
  }
}

void ListScheduler::reset() {
  std::fill(counts_.begin(), counts_.end(), 0);
  for (auto& ends : ends_) std::fill(ends.begin(), ends.end(), kNever);
  std::fill(free_at_.begin(), free_at_.end(), 0.0);
  std::fill(held_.begin(), held_.end(), 0);
  std::fill(num_weights_.begin(), num_weights_.end(), 0);
  for (auto& row : rows_) row.clear();
  events_ = {};
}

double ListScheduler::run(const Policy& policy, double give_up) {
  reset();
  policy_ = &policy;
  for (int rank = 0; rank < instance_.num_ranks(); ++rank) events_.push({0.0, rank});
  while (!events_.empty()) {
    const auto [now, rank] = events_.top();
    events_.pop();
    if (now < free_at_[static_cast<size_t>(rank)]) continue;  // it decides when it is free
    if (now >= give_up) return kNever;
    decide(rank, now);
  }
  size_t num_run = 0;
  for (const auto& row : rows_) num_run += row.size();
  MC_INVARIANT(num_run == instance_.num_actions(), "the list scheduler ran {} actions", num_run);
  const double makespan = *std::max_element(free_at_.begin(), free_at_.end());
  return makespan < give_up ? makespan : kNever;
}

Orders ListScheduler::orders() const {
  Orders orders;
  orders.tokens.reserve(instance_.num_actions());
  for (const auto& row : rows_) {
    orders.tokens.insert(orders.tokens.end(), row.begin(), row.end());
    orders.offsets.push_back(orders.tokens.size());
  }
  return orders;
}

double ListScheduler::key_of(const std::vector<double>& keys, int stage, int microbatch) const {
  return keys[static_cast<size_t>(stage)] + policy_->slope * microbatch;
}

// Runs an action, a W in a gap, or nothing: then the rank sleeps until something arrives.
void ListScheduler::decide(int rank, double now) {
  const auto r = static_cast<size_t>(rank);
  Candidate best;
  Candidate filler;  // the most urgent that is there already
  for (const int32_t stage : instance_.placement.stages_of(rank)) {
    const int forward = done(stage, Part::kForward);
    const int backward = done(stage, Part::kBackward);
    const auto s = static_cast<size_t>(stage);
    if (forward < instance_.num_microbatches) {
      const double arrival =
          stage == 0 ? 0.0 : ends_[0][instance_.at(stage - 1, forward)] + instance_.hop[s];
      if (arrival <= now + policy_->patience) {
        const bool blocked = !is_admissible(rank, stage);
        if (!blocked || num_weights_[r] > 0) {
          consider(best, filler,
                   {key_of(policy_->forward_keys, stage, forward),
                    arrival,
                    {stage, Part::kForward},
                    blocked},
                   now);
        }
      }
    }
    if (backward < forward) {
      const bool last = stage + 1 == instance_.num_stages();
      const double arrival =
          last ? 0.0 : ends_[1][instance_.at(stage + 1, backward)] + instance_.hop[s + 1];
      if (arrival <= now + policy_->patience) {
        consider(
            best, filler,
            {key_of(policy_->backward_keys, stage, backward), arrival, {stage, Part::kBackward}},
            now);
      }
    }
  }
  const int weight = num_weights_[r] > 0 ? oldest_weight(rank) : -1;
  const Token weight_token{weight, Part::kWeight};
  if (weight >= 0 && (!best.exists() || best.blocked || num_weights_[r] > policy_->backlog)) {
    return start(rank, weight_token, now);
  }
  if (!best.exists()) return;
  if (best.arrival <= now) return start(rank, best.token, now);
  const double gap = best.arrival - now + kSameTime;
  if (filler.exists() && instance_.duration(filler.token) <= gap) {
    return start(rank, filler.token, now);
  }
  if (weight >= 0 && instance_.duration(weight_token) <= gap) {
    return start(rank, weight_token, now);
  }
  events_.push({best.arrival, rank});
}

void ListScheduler::consider(Candidate& best,
                             Candidate& filler,
                             const Candidate& candidate,
                             double now) const {
  const auto is_before = [](const Candidate& a, const Candidate& b) {
    if (a.key != b.key) return a.key < b.key;
    return a.arrival < b.arrival;
  };
  if (!best.exists() || is_before(candidate, best)) best = candidate;
  if (candidate.blocked || candidate.arrival > now) return;
  if (!filler.exists() || is_before(candidate, filler)) filler = candidate;
}

bool ListScheduler::is_admissible(int rank, int stage) const {
  const int held = done(stage, Part::kForward) - done(stage, instance_.release());
  if (!policy_->caps.empty() && held >= policy_->caps[static_cast<size_t>(stage)]) return false;
  return leaves_room(instance_, counts_, held_[static_cast<size_t>(rank)], stage);
}

// The stage of the W that comes first in the order of microbatches, deeper stages first.
int ListScheduler::oldest_weight(int rank) const {
  int oldest = -1;
  for (const int32_t stage : instance_.placement.stages_of(rank)) {
    const int microbatch = done(stage, Part::kWeight);
    if (microbatch == done(stage, Part::kBackward)) continue;
    if (oldest < 0 || microbatch <= done(oldest, Part::kWeight)) oldest = stage;
  }
  return oldest;
}

void ListScheduler::start(int rank, const Token& token, double now) {
  const auto r = static_cast<size_t>(rank);
  const int microbatch = done(token.stage, token.part)++;
  const double end = now + instance_.duration(token);
  held_[r] += instance_.held_by(token);
  if (token.part == Part::kWeight) {
    --num_weights_[r];
  } else {
    const bool forward = token.part == Part::kForward;
    if (!forward && instance_.split) ++num_weights_[r];
    ends_[forward ? 0 : 1][instance_.at(token.stage, microbatch)] = end;
    const int reader = token.stage + (forward ? 1 : -1);
    if (reader >= 0 && reader < instance_.num_stages()) {
      const size_t edge = static_cast<size_t>(forward ? reader : token.stage);
      const int other = instance_.placement.rank_of(reader);
      if (other != rank) events_.push({end + instance_.hop[edge], other});
    }
  }
  rows_[r].push_back(token);
  free_at_[r] = end;
  events_.push({end, rank});
}

}  // namespace megacore::pipeline
