// Can a loop of two chunks run for ever without a gap on any rank? Looks at every state it can
// reach.
//
// F takes 1 and B takes 2, so on a rank without gaps all actions start at the same fraction of a
// unit. Between two ranks these fractions differ, by something between the latency c and 1 - c: an
// F and a B that cross there wait 1 together, in one of the two directions, whatever c > 0 is. Time
// is therefore counted in whole units: a message takes 1 in one direction, 0 in the other. Which
// ranks are ahead of the one before them changes nothing but the sum over the ring.

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace {

constexpr size_t kMostRanks = 3;
constexpr size_t kMostKinds = 4 * kMostRanks;  // of actions: F and B of two chunks per rank

// Kinds in the order a microbatch takes them: F of stages 0 .. 2p-1, B of 2p-1 .. 0.
struct State {
  std::array<uint8_t, kMostKinds> ready = {};    // microbatches that can take the kind
  std::array<uint8_t, kMostKinds> on_way = {};   // that can in a unit
  std::array<uint8_t, kMostRanks> left = {};     // units until the rank is free
  std::array<uint8_t, kMostRanks> running = {};  // kind, while left > 0

  friend auto operator<=>(const State&, const State&) = default;
};

class Loop {
 public:
  // `ahead` ranks, the last ones, wait for messages from the rank before them; -1: free messages.
  Loop(size_t num_ranks, int limit, int ahead)
      : num_ranks_(num_ranks), num_kinds_(4 * num_ranks), limit_(limit), ahead_(ahead) {}

  bool runs_without_gaps() {
    number({});
    for (size_t i = 0; i < states_.size(); ++i) expand(i);
    // What has no next state without a gap is no part of an endless run.
    std::vector<size_t> dead;
    for (size_t i = 0; i < states_.size(); ++i) {
      if (num_next_[i] == 0) dead.push_back(i);
    }
    size_t num_dead = dead.size();
    while (!dead.empty()) {
      const size_t i = dead.back();
      dead.pop_back();
      for (const size_t before : before_[i]) {
        if (--num_next_[before] > 0) continue;
        dead.push_back(before);
        ++num_dead;
      }
    }
    return num_dead < states_.size();
  }

 private:
  size_t stage_of(size_t kind) const {
    return kind < num_kinds_ / 2 ? kind : num_kinds_ - 1 - kind;
  }
  size_t rank_of(size_t kind) const { return stage_of(kind) % num_ranks_; }

  bool waits(size_t kind) const {
    const size_t half = num_kinds_ / 2;
    if (ahead_ < 0 || kind == half) return false;
    // The rank that is further in the ring of the two that the message is between.
    const size_t later = rank_of(kind < half ? kind : kind - 1);
    const bool is_ahead = later + static_cast<size_t>(ahead_) >= num_ranks_;
    return is_ahead == (kind < half);
  }

  // Activations of the rank: from the start of F to the end of B.
  int held(const State& state, size_t rank) const {
    int count = 0;
    for (size_t first = rank; first < num_kinds_ / 2; first += num_ranks_) {
      const size_t last = num_kinds_ - 1 - first;
      for (size_t kind = first + 1; kind <= last; ++kind) {
        count += state.ready[kind] + state.on_way[kind];
      }
      for (size_t r = 0; r < num_ranks_; ++r) {
        count += state.left[r] > 0 && first <= state.running[r] && state.running[r] <= last;
      }
    }
    return count;
  }

  size_t number(const State& state) {
    const auto [at, is_new] = numbers_.try_emplace(state, states_.size());
    if (is_new) {
      states_.push_back(state);
      before_.emplace_back();
      num_next_.push_back(0);
    }
    return at->second;
  }

  // All choices of all free ranks; with gaps too, so that every state is found.
  void expand(size_t i) {
    std::vector<std::pair<State, bool>> choices{{states_[i], true}};
    for (size_t rank = 0; rank < num_ranks_; ++rank) {
      if (states_[i].left[rank] > 0) continue;
      std::vector<std::pair<State, bool>> more;
      for (const auto& [state, gapless] : choices) {
        more.push_back({state, false});
        for (size_t kind = 0; kind < num_kinds_; ++kind) {
          if (!can_start(states_[i], state, rank, kind)) continue;
          more.push_back({state, gapless});
          State& next = more.back().first;
          if (kind > 0) --next.ready[kind];
          next.left[rank] = kind < num_kinds_ / 2 ? 1 : 2;
          next.running[rank] = static_cast<uint8_t>(kind);
        }
      }
      choices = std::move(more);
    }
    for (auto& [state, gapless] : choices) {
      const size_t next = number(after_a_unit(state));
      if (!gapless) continue;
      before_[next].push_back(i);
      ++num_next_[i];
    }
  }

  // What was ready at the start of the unit can start, also after other ranks have chosen.
  bool can_start(const State& start, const State& now, size_t rank, size_t kind) const {
    if (rank_of(kind) != rank || (kind > 0 && start.ready[kind] == 0)) return false;
    return kind >= num_kinds_ / 2 || held(now, rank) < limit_;
  }

  State after_a_unit(State state) const {
    for (size_t kind = 0; kind < num_kinds_; ++kind) {
      state.ready[kind] = static_cast<uint8_t>(state.ready[kind] + state.on_way[kind]);
      state.on_way[kind] = 0;
    }
    for (size_t rank = 0; rank < num_ranks_; ++rank) {
      if (state.left[rank] == 0 || --state.left[rank] > 0) continue;
      const size_t next = std::exchange(state.running[rank], uint8_t{0}) + size_t{1};
      if (next == num_kinds_) continue;
      ++(waits(next) ? state.on_way : state.ready)[next];
    }
    return state;
  }

  size_t num_ranks_;
  size_t num_kinds_;
  int limit_;
  int ahead_;
  std::map<State, size_t> numbers_;
  std::vector<State> states_;
  std::vector<std::vector<size_t>> before_;  // without a gap between
  std::vector<int> num_next_;                // without a gap
};

// Whether there is a run for some set of ranks that are ahead; none and all cannot close the ring.
bool runs_with_messages(size_t num_ranks, int limit) {
  for (int ahead = 1; ahead < static_cast<int>(num_ranks); ++ahead) {
    if (Loop(num_ranks, limit, ahead).runs_without_gaps()) return true;
  }
  return false;
}

TEST(GaplessLoopTest, FreeMessagesNeedTheMemoryOfPMicrobatches) {
  for (const size_t p : {2U, 3U}) {
    const int limit = 2 * static_cast<int>(p);
    EXPECT_TRUE(Loop(p, limit, -1).runs_without_gaps()) << p;
  }
}

TEST(GaplessLoopTest, MessagesNeedTheMemoryOfInterleaved1F1B) {
  for (const size_t p : {2U, 3U}) {
    const int interleaved = 3 * static_cast<int>(p) - 1;
    EXPECT_FALSE(runs_with_messages(p, interleaved - 1)) << p;
    EXPECT_TRUE(runs_with_messages(p, interleaved)) << p;
  }
}

}  // namespace
