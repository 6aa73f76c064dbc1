#include "search/beam_state.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "megacore/base/splitmix.h"

namespace megacore::pipeline {
namespace {

// Activations of one stage that can wait at once.
size_t capacity_of(const Instance& instance) {
  int64_t most = 1;
  for (int stage = 0; stage < instance.num_stages(); ++stage) {
    const auto rank = static_cast<size_t>(instance.placement.rank_of(stage));
    const int64_t size = instance.size[static_cast<size_t>(stage)];
    most = std::max(most, size > 0 ? instance.limit[rank] / size : instance.num_microbatches);
  }
  return static_cast<size_t>(std::min<int64_t>(most, instance.num_microbatches));
}

std::vector<double> tails_of(const Instance& instance) {
  std::vector<double> tails(static_cast<size_t>(instance.num_ranks()), kNever);
  double tail = 0.0;
  for (int stage = 0; stage < instance.num_stages(); ++stage) {
    const auto s = static_cast<size_t>(stage);
    double& own = tails[static_cast<size_t>(instance.placement.rank_of(stage))];
    // Its last action can be a W that nothing waits for.
    own = instance.split ? 0.0 : std::min(own, tail);
    tail += instance.backward[s] + (stage + 1 < instance.num_stages() ? instance.hop[s + 1] : 0.0);
  }
  return tails;
}

// Ranks with a stage next to one of this rank.
std::vector<int32_t> neighbours_of(const Instance& instance, int rank) {
  std::vector<int32_t> ranks = {rank};
  for (const int32_t stage : instance.placement.stages_of(rank)) {
    if (stage > 0) ranks.push_back(instance.placement.rank_of(stage - 1));
    if (stage + 1 < instance.num_stages()) ranks.push_back(instance.placement.rank_of(stage + 1));
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

}  // namespace

int32_t History::add(int32_t before, const Token& token) {
  entries_.push_back({before, token});
  return static_cast<int32_t>(entries_.size()) - 1;
}

Orders History::orders(int32_t last, const Instance& instance) const {
  std::vector<std::vector<Token>> rows(static_cast<size_t>(instance.num_ranks()));
  for (int32_t i = last; i >= 0; i = entries_[static_cast<size_t>(i)].before) {
    const Token& token = entries_[static_cast<size_t>(i)].token;
    rows[static_cast<size_t>(instance.placement.rank_of(token.stage))].push_back(token);
  }
  Orders orders;
  for (const auto& row : rows) {
    orders.tokens.insert(orders.tokens.end(), row.rbegin(), row.rend());
    orders.offsets.push_back(orders.tokens.size());
  }
  return orders;
}

BeamModel::BeamModel(const Instance& instance, const DueTimes& due)
    : instance_(instance),
      due_(due),
      mask_(std::bit_ceil(capacity_of(instance)) - 1),
      tails_(tails_of(instance)) {
  for (int rank = 0; rank < instance.num_ranks(); ++rank) {
    neighbours_.push_back(neighbours_of(instance, rank));
  }
  for (int stage = 0; stage < instance.num_stages(); ++stage) {
    for (const Part part : {Part::kForward, Part::kBackward, Part::kWeight}) {
      inputs_.push_back(input_of(stage, part));
    }
  }
}

BeamState BeamModel::empty() const {
  const auto num_stages = static_cast<size_t>(instance_.num_stages());
  const auto num_ranks = static_cast<size_t>(instance_.num_ranks());
  BeamState state{.counts = std::vector<int>(num_stages * 3, 0),
                  .ends = std::vector<double>(num_stages * 2 * (mask_ + 1), 0.0),
                  .free_at = std::vector<double>(num_ranks, 0.0),
                  .left = {},
                  .held = std::vector<int64_t>(num_ranks, 0),
                  .outlook = {}};
  for (int rank = 0; rank < instance_.num_ranks(); ++rank) {
    state.left.push_back(instance_.work(rank) * instance_.num_microbatches);
  }
  for (int rank = 0; rank < instance_.num_ranks(); ++rank) {
    state.outlook.push_back(outlook(state, rank));
  }
  return state;
}

void BeamModel::copy(const BeamState& from, BeamState& to) const {
  const auto keep = [&](int stage, Part part, int reader) {
    const int end = count(from, stage, part);
    for (int k = count(from, reader, part); k < end; ++k) {
      to.ends[place(stage, part, k)] = from.ends[place(stage, part, k)];
    }
  };
  for (int stage = 0; stage + 1 < instance_.num_stages(); ++stage) {
    keep(stage, Part::kForward, stage + 1);
    keep(stage + 1, Part::kBackward, stage);
  }
  std::copy(from.counts.begin(), from.counts.end(), to.counts.begin());
  std::copy(from.free_at.begin(), from.free_at.end(), to.free_at.begin());
  std::copy(from.left.begin(), from.left.end(), to.left.begin());
  std::copy(from.held.begin(), from.held.end(), to.held.begin());
  std::copy(from.outlook.begin(), from.outlook.end(), to.outlook.begin());
  to.key = from.key;
  to.last = from.last;
}

BeamModel::Input BeamModel::input_of(int stage, Part part) const {
  Token from{stage + (part == Part::kForward ? -1 : 1), part};
  if (part == Part::kWeight) from = {stage, Part::kBackward};
  if (part == Part::kBackward && stage + 1 == instance_.num_stages()) {
    from = {stage, Part::kForward};
  }
  if (from.stage < 0) return {};
  const bool is_own = from.stage == stage;
  const auto edge = static_cast<size_t>(std::max(from.stage, stage));
  const double hop = is_own ? 0.0 : instance_.hop[edge];
  return {.slot = slot_of(from),
          .first_end = is_own ? kNone : place(from.stage, from.part, 0),
          .rank = static_cast<size_t>(instance_.placement.rank_of(from.stage)),
          .hop = hop,
          .delay = instance_.duration(from) + hop};
}

double BeamModel::arrival(const BeamState& state, const Token& token) const {
  const int next = state.counts[slot_of(token)];
  if (next == instance_.num_microbatches) return kNever;
  const Input& input = inputs_[slot_of(token)];
  if (input.slot == kNone) return 0.0;
  if (state.counts[input.slot] <= next) return kNever;
  // What the rank itself has run has ended when it is free.
  if (input.first_end == kNone) return 0.0;
  return state.ends[input.first_end + (static_cast<size_t>(next) & mask_)] + input.hop;
}

// Without known inputs a bound: the rank that must run the input is busy until then.
double BeamModel::earliest_arrival(const BeamState& state, const Token& token) const {
  const Input& input = inputs_[slot_of(token)];
  return state.free_at[input.rank] + input.delay;
}

RankOutlook BeamModel::outlook(const BeamState& state, int rank) const {
  const double free_at = state.free_at[static_cast<size_t>(rank)];
  RankOutlook outlook{.next = kNever, .lateness = -kNever, .first_end = kNever};
  const auto stages = instance_.placement.stages_of(rank);
  double release = kNever;  // until when a forward without room waits
  for (const int32_t stage : stages) {
    release = std::min(release, look_at_backward(state, stage, outlook));
  }
  for (const int32_t stage : stages) look_at_forward(state, stage, release, outlook);
  if (outlook.next == kNever) outlook.next = free_at;
  if (outlook.lateness == -kNever) outlook.lateness = 0.0;
  return outlook;
}

// Returns when the stage can release an activation.
double BeamModel::look_at_backward(const BeamState& state, int stage, RankOutlook& outlook) const {
  const auto s = static_cast<size_t>(stage);
  const double free_at = state.free_at[static_cast<size_t>(instance_.placement.rank_of(stage))];
  const int k = count(state, stage, Part::kBackward);
  double release = kNever;
  if (instance_.split && count(state, stage, Part::kWeight) < k) {
    release = free_at + instance_.weight[s];
    outlook.next = free_at;
    outlook.first_end = std::min(outlook.first_end, release);
  }
  if (k == instance_.num_microbatches) return release;
  const Token token{stage, Part::kBackward};
  const double known = arrival(state, token);
  const bool is_known = known < kNever;
  const double start = std::max(free_at, is_known ? known : earliest_arrival(state, token));
  const double end = start + instance_.backward[s];
  if (is_known) outlook.first_end = std::min(outlook.first_end, end);
  outlook.next = std::min(outlook.next, start);
  outlook.lateness = std::max(outlook.lateness, start - due_.backward[instance_.at(stage, k)]);
  return std::min(release, end + instance_.weight[s]);
}

void BeamModel::look_at_forward(const BeamState& state,
                                int stage,
                                double release,
                                RankOutlook& outlook) const {
  const auto rank = static_cast<size_t>(instance_.placement.rank_of(stage));
  const int k = count(state, stage, Part::kForward);
  if (k == instance_.num_microbatches) return;
  const Token token{stage, Part::kForward};
  const double known = arrival(state, token);
  const bool is_known = known < kNever;
  double start = std::max(state.free_at[rank], is_known ? known : earliest_arrival(state, token));
  outlook.lateness = std::max(outlook.lateness, start - due_.forward[instance_.at(stage, k)]);
  const double end = start + instance_.forward[static_cast<size_t>(stage)];
  if (start >= outlook.next && end >= outlook.first_end) return;
  if (!leaves_room(instance_, state.counts, state.held[rank], stage)) {
    start = std::max(start, release);
  } else if (is_known) {
    outlook.first_end = std::min(outlook.first_end, end);
  }
  outlook.next = std::min(outlook.next, start);
}

BeamModel::Undo BeamModel::apply(BeamState& state, const Token& token, double start) const {
  const auto rank = static_cast<size_t>(instance_.placement.rank_of(token.stage));
  const Undo before{state.free_at[rank], state.left[rank]};
  const int microbatch = state.counts[slot_of(token)]++;
  const double end = start + instance_.duration(token);
  if (token.part != Part::kWeight) state.ends[place(token.stage, token.part, microbatch)] = end;
  state.free_at[rank] = end;
  state.left[rank] -= instance_.duration(token);
  state.held[rank] += instance_.held_by(token);
  return before;
}

void BeamModel::undo(BeamState& state, const Token& token, const Undo& before) const {
  const auto rank = static_cast<size_t>(instance_.placement.rank_of(token.stage));
  --state.counts[slot_of(token)];
  state.free_at[rank] = before.free_at;
  state.left[rank] = before.left;
  state.held[rank] -= instance_.held_by(token);
}

uint64_t BeamModel::key_after(const BeamState& state, const Token& token) const {
  const auto count = static_cast<uint64_t>(state.counts[slot_of(token)]);
  return state.key + base::mixed((count << 32) + slot_of(token) + 1);
}

}  // namespace megacore::pipeline
