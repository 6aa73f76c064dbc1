#include "search/layer_search.h"

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bounds/deadline_bound.h"
#include "search/beam_state.h"
#include "search/layer_limits.h"

namespace megacore::pipeline {
namespace {

// What is later by less is not later; all actions of a schedule together by less than kSameTime.
constexpr double kEarlier = 1e-12;

// A partial schedule, and the forwards that wait although they could run.
struct Node {
  BeamState state;
  uint64_t deferred = 0;  // by stage
  int32_t alike = -1;     // another one of the layer with the same key
  bool is_dropped = false;
};

// Partial schedules with equally many actions; nodes are kept for the layers to come.
struct Layer {
  std::vector<Node> nodes;
  size_t size = 0;
  std::unordered_map<uint64_t, int32_t> newest;  // by key

  void clear() {
    size = 0;
    newest.clear();
  }
};

class Layers {
 public:
  Layers(const Instance& instance, const StartWindows& windows, const LayerSearch& search)
      : instance_(instance),
        search_(search),
        due_{windows.latest_forward, windows.latest_backward},
        model_(instance, due_),
        limits_(instance, model_, due_),
        scratch_{.state = model_.empty()},
        empty_{scratch_} {}

  LayerResult run() && {
    if (limits_.tighten(scratch_.state, 0, nullptr)) add(scratch_, next_);
    for (size_t i = 0; i < instance_.num_actions(); ++i) {
      std::swap(layer_, next_);
      next_.clear();
      // Nodes that defer a forward join this layer on the way.
      for (size_t at = 0; at < layer_.size; ++at) {
        if (layer_.nodes[at].is_dropped) continue;
        if (++result_.num_states > search_.max_states || next_.size > search_.max_width) {
          return std::move(result_);
        }
        extend(at);
      }
    }
    finish();
    return std::move(result_);
  }

 private:
  struct Choice {
    Token token;
    double start;
    double end;
  };

  // The next actions of a rank that are known to be able to run.
  void list_choices(const Node& node, int rank) {
    choices_.clear();
    const auto r = static_cast<size_t>(rank);
    for (const int32_t stage : instance_.placement.stages_of(rank)) {
      for (const Part part : {Part::kForward, Part::kBackward}) {
        const Token token{stage, part};
        const double arrival = model_.arrival(node.state, token);
        if (arrival == kNever) continue;
        if (part == Part::kForward &&
            (is_deferred(node.deferred, stage) || is_full(node.state, stage))) {
          continue;
        }
        const double start = std::max(arrival, node.state.free_at[r]);
        choices_.push_back({token, start, start + instance_.duration(token)});
      }
    }
  }

  bool is_full(const BeamState& state, int stage) const {
    const auto rank = static_cast<size_t>(instance_.placement.rank_of(stage));
    return state.held[rank] + instance_.size[static_cast<size_t>(stage)] > instance_.limit[rank];
  }

  // The rank that can end something first runs it, or what it can start before that end. All that
  // could arrive before is known, as no other rank ends anything earlier.
  void extend(size_t at) {
    Choice first{.token = {}, .start = kNever, .end = kNever};
    for (int rank = 0; rank < instance_.num_ranks(); ++rank) {
      list_choices(layer_.nodes[at], rank);
      for (const Choice& choice : choices_) {
        if (choice.end < first.end) first = choice;
      }
    }
    if (first.end == kNever) return;  // no rank has room to go on
    list_choices(layer_.nodes[at], instance_.placement.rank_of(first.token.stage));
    for (const Choice& choice : choices_) {
      if (choice.start < first.end - kEarlier) run_choice(layer_.nodes[at], choice);
    }
    if (first.token.part == Part::kForward) defer(layer_.nodes[at], first);
  }

  void run_choice(const Node& node, const Choice& choice) {
    model_.copy(node.state, scratch_.state);
    const int rank = instance_.placement.rank_of(choice.token.stage);
    scratch_.state.key = model_.key_after(node.state, choice.token);
    model_.apply(scratch_.state, choice.token, choice.start);
    scratch_.deferred = limits_.still_deferred(scratch_.state, node.deferred, rank);
    if (!limits_.tighten(scratch_.state, scratch_.deferred, &node.state)) return;
    if (is_dominated(scratch_, next_, false)) return;
    scratch_.state.last = history_.add(node.state.last, choice.token);
    add(scratch_, next_);
  }

  // The rank leaves a gap in which this action has room. Only for a forward that can be better,
  // and only if the rank holds all that it may before the forward comes: else it could as well
  // fill the gap.
  void defer(const Node& node, const Choice& choice) {
    model_.copy(node.state, scratch_.state);
    scratch_.deferred = node.deferred | uint64_t{1} << static_cast<unsigned>(choice.token.stage);
    const auto rank = static_cast<size_t>(instance_.placement.rank_of(choice.token.stage));
    scratch_.state.free_at[rank] = choice.end;
    if (!limits_.tighten(scratch_.state, scratch_.deferred, &node.state)) return;
    if (!is_dominated(scratch_, layer_, true)) add(scratch_, layer_);
  }

  // Whether a node of the layer makes this one needless; drops those that it makes needless. What
  // has gone on with fewer deferred forwards may count on this very node.
  bool is_dominated(const Node& node, Layer& layer, bool same_deferred) {
    const auto found = layer.newest.find(node.state.key);
    if (found == layer.newest.end()) return false;
    for (int32_t i = found->second; i >= 0; i = layer.nodes[static_cast<size_t>(i)].alike) {
      Node& other = layer.nodes[static_cast<size_t>(i)];
      if (other.is_dropped || other.state.counts != node.state.counts) continue;
      if (same_deferred && other.deferred != node.deferred) continue;
      if (dominates(other, node)) return true;
      if (dominates(node, other)) other.is_dropped = true;
    }
    return false;
  }

  bool dominates(const Node& one, const Node& other) const {
    if ((one.deferred & ~other.deferred) != 0) return false;
    for (size_t rank = 0; rank < one.state.free_at.size(); ++rank) {
      if (one.state.free_at[rank] > other.state.free_at[rank] + kEarlier) return false;
    }
    return limits_.waits_no_longer(one.state, other.state, kEarlier);
  }

  void add(const Node& node, Layer& layer) {
    if (layer.size == layer.nodes.size()) layer.nodes.push_back(empty_);
    const auto at = static_cast<int32_t>(layer.size);
    Node& place = layer.nodes[layer.size++];
    model_.copy(node.state, place.state);
    place.deferred = node.deferred;
    place.is_dropped = false;
    const auto [newest, is_first] = layer.newest.try_emplace(node.state.key, at);
    place.alike = is_first ? -1 : std::exchange(newest->second, at);
  }

  void finish() {
    result_.is_complete = true;
    const BeamState* best = nullptr;
    double best_end = kNever;
    for (size_t i = 0; i < next_.size; ++i) {
      const Node& node = next_.nodes[i];
      const std::vector<double>& ends = node.state.free_at;
      const double end = *std::max_element(ends.begin(), ends.end());
      if (node.is_dropped || end >= best_end) continue;
      best_end = end;
      best = &node.state;
    }
    if (best == nullptr) return;
    result_.orders = history_.orders(best->last, instance_);
  }

  const Instance& instance_;
  LayerSearch search_;
  DueTimes due_;
  BeamModel model_;
  LayerLimits limits_;
  Node scratch_;
  Node empty_;
  Layer layer_;
  Layer next_;
  History history_;
  std::vector<Choice> choices_;
  LayerResult result_;
};

}  // namespace

bool can_search_layers(const Instance& instance) {
  constexpr int kMostStages = 64;
  if (instance.split || instance.num_stages() > kMostStages) return false;
  for (int stage = 0; stage < instance.num_stages(); ++stage) {
    const auto s = static_cast<size_t>(stage);
    if (instance.forward[s] <= kSameTime || instance.backward[s] <= kSameTime) return false;
  }
  return true;
}

LayerResult search_layers(const BoundProblem& problem,
                          const Instance& instance,
                          const LayerSearch& search) {
  constexpr int64_t kWindowSteps = 200'000;
  const auto windows = start_windows(problem, search.end, kWindowSteps);
  if (!windows) return {.is_complete = true};
  return Layers(instance, *windows, search).run();
}

}  // namespace megacore::pipeline
