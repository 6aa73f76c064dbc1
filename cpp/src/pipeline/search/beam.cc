#include "search/beam.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>
#include <utility>

#include "search/beam_state.h"

namespace megacore::pipeline {
namespace {

// States with the same actions done.
constexpr int kMostAlike = 2;

class Beam {
 public:
  Beam(const Instance& instance, const DueTimes& due, const BeamSearch& search)
      : instance_(instance),
        search_(search),
        model_(instance, due),
        parts_(instance.split ? 3 : 2),
        states_(search.width, model_.empty()),
        next_states_(states_) {
    double work = 0.0;
    for (int rank = 0; rank < instance.num_ranks(); ++rank) work += instance.work(rank);
    quantum_ =
        std::max(work / instance.num_stages() * kSameTime, std::numeric_limits<double>::min());
  }

  BeamResult run() && {
    size_t size = 1;
    for (size_t i = 0; i < instance_.num_actions() && size > 0; ++i) {
      steps_.clear();
      outlooks_.clear();
      for (size_t parent = 0; parent < size; ++parent) add_steps(static_cast<int32_t>(parent));
      size = keep_best();
    }
    if (size > 0) finish(size);
    return std::move(result_);
  }

 private:
  // One way to go on.
  struct Step {
    int64_t rating;
    uint64_t key;
    int32_t parent;
    Token token;
    double start;
    size_t first_outlook;  // of the ranks near
  };
  struct Choice {
    Token token;
    double start;
    double end;
  };

  // What a rank can run next. Of the W that it can only the oldest.
  void list_choices(const BeamState& state, int rank) {
    choices_.clear();
    const auto r = static_cast<size_t>(rank);
    Token weight{-1, Part::kWeight};
    for (const int32_t stage : instance_.placement.stages_of(rank)) {
      for (int part = 0; part < parts_; ++part) {
        const Token token{stage, static_cast<Part>(part)};
        const double arrival = model_.arrival(state, token);
        if (arrival == kNever) continue;
        if (token.part == Part::kWeight) {
          const bool older =
              weight.stage < 0 || model_.count(state, stage, Part::kWeight) <=
                                      model_.count(state, weight.stage, Part::kWeight);
          if (older) weight = token;
          continue;
        }
        if (token.part == Part::kForward &&
            !leaves_room(instance_, state.counts, state.held[r], stage)) {
          continue;
        }
        add_choice(token, std::max(arrival, state.free_at[r]));
      }
    }
    if (weight.stage >= 0) add_choice(weight, state.free_at[r]);
  }

  void add_choice(const Token& token, double start) {
    choices_.push_back({token, start, start + instance_.duration(token)});
  }

  // The rank that can end something first runs it, or what it can start before that end. All that
  // could arrive before is known, as no other rank ends anything earlier.
  void add_steps(int32_t parent) {
    BeamState& state = states_[static_cast<size_t>(parent)];
    int first = 0;
    double first_end = kNever;
    for (int rank = 0; rank < instance_.num_ranks(); ++rank) {
      const double end = state.outlook[static_cast<size_t>(rank)].first_end;
      if (end >= first_end - kSameTime) continue;
      first_end = end;
      first = rank;
    }
    list_choices(state, first);
    for (const Choice& choice : choices_) {
      const bool is_first = choice.end <= first_end + kSameTime;
      if (!is_first && choice.start >= first_end - kSameTime) continue;
      add_step(state, parent, choice);
    }
  }

  void add_step(BeamState& state, int32_t parent, const Choice& choice) {
    ++result_.num_scheduled;
    const uint64_t key = model_.key_after(state, choice.token);
    const BeamModel::Undo before = model_.apply(state, choice.token, choice.start);
    const int rank = instance_.placement.rank_of(choice.token.stage);
    const size_t first_outlook = outlooks_.size();
    for (const int32_t near : model_.neighbours(rank)) {
      outlooks_.push_back(model_.outlook(state, near));
    }
    const double rating = rate(state, model_.neighbours(rank), first_outlook);
    model_.undo(state, choice.token, before);
    if (rating == kNever) return;
    // Differences by rounding shall not decide.
    steps_.push_back(
        {std::llround(rating / quantum_), key, parent, choice.token, choice.start, first_outlook});
  }

  // The smaller, the better; kNever without hope. The outlooks of ranks in `near` are new.
  double rate(const BeamState& state,
              const std::vector<int32_t>& near,
              size_t first_outlook) const {
    size_t next_near = 0;
    double sum = 0.0;
    double latest = 0.0;
    for (int32_t rank = 0; rank < instance_.num_ranks(); ++rank) {
      const auto r = static_cast<size_t>(rank);
      const bool is_near = next_near < near.size() && near[next_near] == rank;
      const RankOutlook& outlook =
          is_near ? outlooks_[first_outlook + next_near++] : state.outlook[r];
      const double end = outlook.next + state.left[r] + model_.tail(r);
      if (end >= search_.give_up - kSameTime) return kNever;
      sum += end + search_.pull * outlook.lateness;
      latest = std::max(latest, outlook.lateness);
    }
    return sum / instance_.num_ranks() + latest;
  }

  // Returns how many states there are now.
  size_t keep_best() {
    std::stable_sort(steps_.begin(), steps_.end(),
                     [](const Step& a, const Step& b) { return a.rating < b.rating; });
    alike_.clear();
    size_t size = 0;
    for (const Step& step : steps_) {
      if (size == search_.width) break;
      auto& [count, rating] = alike_[step.key];
      // With the same rating too it is all but certainly the same.
      if (count >= kMostAlike || (count > 0 && rating == step.rating)) continue;
      ++count;
      rating = step.rating;
      take(step, next_states_[size++]);
    }
    std::swap(states_, next_states_);
    return size;
  }

  void take(const Step& step, BeamState& state) {
    model_.copy(states_[static_cast<size_t>(step.parent)], state);
    model_.apply(state, step.token, step.start);
    size_t outlook = step.first_outlook;
    for (const int32_t near : model_.neighbours(instance_.placement.rank_of(step.token.stage))) {
      state.outlook[static_cast<size_t>(near)] = outlooks_[outlook++];
    }
    state.key = step.key;
    state.last = history_.add(state.last, step.token);
  }

  void finish(size_t size) {
    const BeamState* best = nullptr;
    for (size_t i = 0; i < size; ++i) {
      const std::vector<double>& ends = states_[i].free_at;
      const double makespan = *std::max_element(ends.begin(), ends.end());
      if (makespan >= result_.makespan) continue;
      result_.makespan = makespan;
      best = &states_[i];
    }
    if (best == nullptr) return;
    result_.orders = history_.orders(best->last, instance_);
  }

  const Instance& instance_;
  BeamSearch search_;
  BeamModel model_;
  int parts_;
  double quantum_;
  std::vector<BeamState> states_;
  std::vector<BeamState> next_states_;
  History history_;
  std::vector<Step> steps_;
  std::vector<RankOutlook> outlooks_;  // of the steps
  std::vector<Choice> choices_;        // of one rank
  std::unordered_map<uint64_t, std::pair<int, int64_t>> alike_;
  BeamResult result_;
};

}  // namespace

BeamResult search_beam(const Instance& instance, const DueTimes& due, const BeamSearch& search) {
  return Beam(instance, due, search).run();
}

}  // namespace megacore::pipeline
