#include "bounds/deadline_bound.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "bounds/one_machine.h"
#include "stage_costs.h"

namespace megacore::pipeline {
namespace {

constexpr double kRounding = 1e-9;

// The actions of one kind of one stage, which can be taken to run in the order of the microbatches:
// entry k of heads belongs to the one with k others before it, of tails, after it. Both ascend.
struct Lane {
  double duration = 0.0;
  std::vector<double> heads = {};
  std::vector<double> tails = {};
};

// Earliest end of a set of jobs of one machine that grows by one job at a time, each O(log n).
// Source: Vilim, O(n log n) filtering algorithms for unary resource constraint, CPAIOR 2004.
class GrowingSet {
 public:
  // For up to `count` jobs.
  void reset(size_t count) {
    leaves_ = 1;
    while (leaves_ < count) leaves_ *= 2;
    nodes_.assign(2 * leaves_, {0.0, -kInfinity});
  }

  // `position` is that of the job in the order of heads.
  void add(size_t position, double head, double duration) {
    size_t i = leaves_ + position;
    nodes_[i] = {duration, head + duration};
    for (i /= 2; i >= 1; i /= 2) {
      const Node& left = nodes_[2 * i];
      const Node& right = nodes_[2 * i + 1];
      nodes_[i] = {left.work + right.work, std::max(right.end, left.end + right.work)};
    }
  }

  double earliest_end() const { return nodes_[1].end; }

 private:
  struct Node {
    double work;
    double end;
  };
  size_t leaves_ = 1;
  std::vector<Node> nodes_;
};

// One rank, or its actions taken together whatever their stage.
struct Machine {
  static constexpr int kNone = std::numeric_limits<int>::min() / 4;

  std::vector<size_t> lanes = {};
  // Before action k of lane i at least k + before[i][j] of lane j have run.
  std::vector<std::vector<int>> before = {};

  void close() {
    const size_t n = lanes.size();
    for (size_t via = 0; via < n; ++via) {
      for (size_t i = 0; i < n; ++i) {
        for (size_t j = 0; j < n; ++j) {
          if (before[i][via] == kNone || before[via][j] == kNone) continue;
          before[i][j] = std::max(before[i][j], before[i][via] - 1 + before[via][j]);
        }
      }
    }
  }
};

// All windows, for one end.
class Windows {
 public:
  Windows(const BoundProblem& problem, const StageCosts& costs, int64_t max_steps)
      : problem_(problem), parts_(problem.split_backward ? 3 : 2), steps_left_(max_steps) {
    const size_t num_stages = costs.forward.size();
    lanes_.resize(num_stages * parts_);
    for (size_t s = 0; s < num_stages; ++s) {
      lane(s, 0).duration = costs.forward[s];
      lane(s, 1).duration = problem.split_backward ? costs.input[s] : costs.backward[s];
      if (parts_ == 3) lane(s, 2).duration = costs.weight[s];
    }
    const auto count = static_cast<size_t>(problem.num_microbatches);
    for (Lane& own : lanes_) {
      own.heads.assign(count, 0.0);
      own.tails.assign(count, 0.0);
    }
    for (size_t s = 0; s < num_stages; ++s) add_arcs(s, costs.send);
    for (int rank = 0; rank < problem.placement.num_ranks(); ++rank) add_rank(rank);
  }

  bool has_steps() const { return steps_left_ > 0; }

  // Narrows all windows as far as they go; false if one is too small. Windows of a later end hold
  // for an earlier one.
  bool narrow(double end) {
    end_ = end;
    bool changed = true;
    while (changed && has_steps()) {
      changed = false;
      for (const bool reversed : {false, true}) {
        changed = follow_arcs(reversed) || changed;
        for (const Rank& rank : ranks_) {
          if (has_steps()) changed = narrow_rank(rank, reversed) || changed;
        }
      }
      if (end_ < kInfinity && !fits()) return false;
    }
    return end_ == kInfinity || delivers();
  }

  // Appends the earliest and the latest starts of all F, or of all B or I.
  void append_starts(size_t part, std::vector<double>& earliest, std::vector<double>& latest) {
    for (int s = 0; s < problem_.placement.num_stages(); ++s) {
      const Lane& own = lane(at(s), part);
      earliest.insert(earliest.end(), own.heads.begin(), own.heads.end());
      for (size_t k = own.tails.size(); k-- > 0;) {
        latest.push_back(end_ - own.tails[k] - own.duration);
      }
    }
  }

  void add_steps(int64_t steps) { steps_left_ += steps; }
  int64_t steps_left() const { return steps_left_; }

 private:
  // Action k of `to` starts `delay` after the end of action k of `from` or later.
  struct Arc {
    size_t from;
    size_t to;
    double delay;
  };
  struct Rank {
    Machine by_stage = {};
    Machine together = {};  // empty for one stage per rank
  };

  static size_t at(int stage) { return static_cast<size_t>(stage); }
  Lane& lane(size_t stage, size_t part) { return lanes_[stage * parts_ + part]; }
  std::vector<double>& starts(size_t lane, bool reversed) {
    return reversed ? lanes_[lane].tails : lanes_[lane].heads;
  }

  void add_arcs(size_t stage, double send) {
    const Placement& placement = problem_.placement;
    const int s = static_cast<int>(stage);
    const int next = placement.next(s);
    if (next < 0) {
      arcs_.push_back({stage * parts_, stage * parts_ + 1, 0.0});
    } else {
      const double hop = placement.rank_of(s) == placement.rank_of(next) ? 0.0 : send;
      arcs_.push_back({stage * parts_, at(next) * parts_, hop});
      arcs_.push_back({at(next) * parts_ + 1, stage * parts_ + 1, hop});
    }
    if (parts_ == 3) arcs_.push_back({stage * parts_ + 1, stage * parts_ + 2, 0.0});
  }

  // How many activations the rank can hold if all were as small as the smallest.
  int limit_of(int rank) const {
    const std::vector<int64_t>& limits = problem_.memory_limit;
    const std::vector<int64_t>& sizes = problem_.activation_size;
    const auto stages = problem_.placement.stages_of(rank);
    const auto all = static_cast<int64_t>(stages.size()) * problem_.num_microbatches;
    if (limits.empty()) return static_cast<int>(all);
    int64_t smallest = sizes.empty() ? 1 : std::numeric_limits<int64_t>::max();
    for (const int32_t s : stages) {
      if (!sizes.empty()) smallest = std::min(smallest, sizes[sizes.size() == 1 ? 0 : at(s)]);
    }
    const int64_t limit = limits[limits.size() == 1 ? 0 : at(rank)];
    return static_cast<int>(std::clamp<int64_t>(limit / smallest, 1, all));
  }

  void add_rank(int rank) {
    const auto stages = problem_.placement.stages_of(rank);
    const size_t num_lanes = stages.size() * parts_;
    Rank own;
    Machine& machine = own.by_stage;
    machine.before.assign(num_lanes, std::vector<int>(num_lanes, Machine::kNone));
    for (size_t i = 0; i < stages.size(); ++i) {
      for (size_t part = 0; part < parts_; ++part) {
        machine.lanes.push_back(at(stages[i]) * parts_ + part);
        machine.before[i * parts_ + part][i * parts_ + part] = 0;
        if (part > 0) machine.before[i * parts_ + part][i * parts_ + part - 1] = 1;
      }
      if (i == 0) continue;
      machine.before[i * parts_][(i - 1) * parts_] = 1;          // F after F of an earlier stage
      machine.before[(i - 1) * parts_ + 1][i * parts_ + 1] = 1;  // B the other way round
    }
    if (stages.size() == 1) {
      machine.before[0][parts_ - 1] = 1 - limit_of(rank);
    } else {
      own.together = together(stages, limit_of(rank));
    }
    machine.close();
    ranks_.push_back(std::move(own));
  }

  // The actions of all stages of a rank by kind: the k-th F of any stage, and so on.
  Machine together(std::span<const int32_t> stages, int limit) {
    Machine machine;
    machine.before.assign(parts_, std::vector<int>(parts_, Machine::kNone));
    const size_t count = stages.size() * at(problem_.num_microbatches);
    for (size_t part = 0; part < parts_; ++part) {
      double shortest = kInfinity;
      for (const int32_t s : stages) shortest = std::min(shortest, lane(at(s), part).duration);
      machine.lanes.push_back(lanes_.size());
      machine.before[part][part] = 0;
      if (part > 0) machine.before[part][part - 1] = 1;
      lanes_.push_back({.duration = shortest,
                        .heads = std::vector<double>(count, 0.0),
                        .tails = std::vector<double>(count, 0.0)});
    }
    machine.before[0][parts_ - 1] = 1 - limit;
    machine.close();
    return machine;
  }

  static bool raise(double& value, double bound) {
    if (bound <= value + kRounding) return false;
    value = bound;
    return true;
  }

  bool follow_arcs(bool reversed) {
    bool changed = false;
    const auto follow = [&](size_t from, size_t to, double delay) {
      const std::vector<double>& first = starts(from, reversed);
      std::vector<double>& then = starts(to, reversed);
      const double way = lanes_[from].duration + delay;
      double last = -kInfinity;
      for (size_t k = 0; k < first.size(); ++k) {
        changed = raise(then[k], std::max(first[k] + way, last)) || changed;
        last = then[k] + lanes_[to].duration;
      }
    };
    // Arcs stand in the order of stages: forwards go up, backwards come down.
    for (size_t i = 0; i < arcs_.size(); ++i) {
      const Arc& up = reversed ? arcs_[arcs_.size() - 1 - i] : arcs_[i];
      reversed ? follow(up.to, up.from, up.delay) : follow(up.from, up.to, up.delay);
    }
    for (size_t i = 0; i < arcs_.size(); ++i) {
      const Arc& down = reversed ? arcs_[i] : arcs_[arcs_.size() - 1 - i];
      reversed ? follow(down.to, down.from, down.delay) : follow(down.from, down.to, down.delay);
    }
    return changed;
  }

  bool narrow_rank(const Rank& rank, bool reversed) {
    bool changed = false;
    if (!rank.together.lanes.empty()) {
      gather(rank, reversed);
      changed = narrow_machine(rank.together, nullptr, reversed);
    }
    const Machine* whole = rank.together.lanes.empty() ? nullptr : &rank.together;
    return narrow_machine(rank.by_stage, whole, reversed) || changed;
  }

  // The k-th of any stage starts no earlier than the k-th head of all.
  void gather(const Rank& rank, bool reversed) {
    for (size_t part = 0; part < parts_; ++part) {
      scratch_.clear();
      for (size_t i = part; i < rank.by_stage.lanes.size(); i += parts_) {
        const std::vector<double>& own = starts(rank.by_stage.lanes[i], reversed);
        scratch_.insert(scratch_.end(), own.begin(), own.end());
      }
      std::sort(scratch_.begin(), scratch_.end());
      std::vector<double>& all = starts(rank.together.lanes[part], reversed);
      for (size_t k = 0; k < all.size(); ++k) all[k] = std::max(all[k], scratch_[k]);
    }
  }

  // An action starts after the earliest end of all that must run before it on its machine: what the
  // order of its kind, dependencies and memory say, and what could not end in time after it.
  // `whole` has the same actions taken together: the k-th of them starts no earlier than its head.
  bool narrow_machine(const Machine& machine, const Machine* whole, bool reversed) {
    sort_jobs(machine, reversed);
    bool changed = false;
    const size_t num_lanes = machine.lanes.size();
    std::vector<size_t> num_before(num_lanes);
    for (size_t c = 0; c < num_lanes; ++c) {
      Lane& own = lanes_[machine.lanes[c]];
      std::vector<double>& own_starts = starts(machine.lanes[c], reversed);
      const int count = static_cast<int>(own_starts.size());
      set_.reset(jobs_.size());
      std::fill(num_before.begin(), num_before.end(), 0);
      for (int k = 0; k < count; ++k) {
        double& start = own_starts[at(k)];
        size_t alike = 0;
        for (size_t o = 0; o < num_lanes; ++o) {
          const Lane& other = lanes_[machine.lanes[o]];
          const std::vector<double>& other_tails = starts(machine.lanes[o], !reversed);
          const int lag = reversed ? machine.before[o][c] : machine.before[c][o];
          const auto least = static_cast<size_t>(std::clamp(k + lag, 0, count));
          const double latest = end_ + kRounding - start - own.duration - other.duration;
          size_t& n = num_before[o];
          const auto size = static_cast<size_t>(count);
          while (n < size && (n < least || (o != c && other_tails[size - 1 - n] > latest))) {
            set_.add(position_[o * size + n], old_starts_[o * size + n], other.duration);
            ++n;
            --steps_left_;
          }
          if (o % parts_ == c % parts_) alike += n;
        }
        double bound = set_.earliest_end();
        if (whole != nullptr) {
          bound = std::max(bound, starts(whole->lanes[c % parts_], reversed)[alike]);
        }
        changed = raise(start, bound) || changed;
      }
    }
    return changed;
  }

  // Positions of all jobs of a machine in the order of their heads.
  void sort_jobs(const Machine& machine, bool reversed) {
    old_starts_.clear();
    for (const size_t lane : machine.lanes) {
      const std::vector<double>& own = starts(lane, reversed);
      old_starts_.insert(old_starts_.end(), own.begin(), own.end());
    }
    jobs_.resize(old_starts_.size());
    std::iota(jobs_.begin(), jobs_.end(), size_t{0});
    std::sort(jobs_.begin(), jobs_.end(),
              [&](size_t a, size_t b) { return old_starts_[a] < old_starts_[b]; });
    position_.resize(jobs_.size());
    for (size_t i = 0; i < jobs_.size(); ++i) position_[jobs_[i]] = i;
  }

  bool fits() const {
    for (const Lane& own : lanes_) {
      const size_t count = own.heads.size();
      for (size_t k = 0; k < count; ++k) {
        if (own.heads[k] + own.duration + own.tails[count - 1 - k] > end_ + kRounding) return false;
      }
    }
    return true;
  }

  // Whether no rank has more work than fits between heads and tails.
  bool delivers() const {
    std::vector<JobClass> jobs;
    for (const Rank& rank : ranks_) {
      for (const Machine* machine : {&rank.by_stage, &rank.together}) {
        jobs.clear();
        for (const size_t lane : machine->lanes) {
          jobs.push_back({lanes_[lane].duration, lanes_[lane].heads, lanes_[lane].tails});
        }
        if (delivery_makespan(jobs) > end_ + kRounding) return false;
      }
    }
    return true;
  }

  const BoundProblem& problem_;
  size_t parts_;  // F and B; or F, I and W
  int64_t steps_left_;
  double end_ = kInfinity;
  std::vector<Lane> lanes_;  // [stage][part], then those of machines taken together
  std::vector<Arc> arcs_;
  std::vector<Rank> ranks_;
  // Scratch.
  GrowingSet set_;
  std::vector<double> scratch_;
  std::vector<double> old_starts_;
  std::vector<size_t> jobs_;
  std::vector<size_t> position_;
};

}  // namespace

double deadline_bound(const BoundProblem& problem,
                      double proved,
                      double makespan,
                      int64_t max_steps) {
  const StageCosts costs = stage_costs(problem.costs, problem.placement.num_stages());
  Windows all(problem, costs, max_steps);
  all.narrow(kInfinity);
  const auto refutes = [&](double end) {
    Windows windows = all;
    const bool refuted = !windows.narrow(end);
    all.add_steps(windows.steps_left() - all.steps_left());
    return refuted;
  };
  // Most often the makespan is the smallest there is, or none of the ends is refuted.
  if (refutes(makespan - 2 * kRounding)) return makespan;
  // The ends tried do not depend on what is proved already: a problem that allows more, such as
  // more memory, refutes fewer of the same ends.
  constexpr int kEnds = 1 << 14;
  const double step = makespan / kEnds;
  int low = static_cast<int>(proved / step);
  int high = kEnds;
  while (high - low > 1 && all.has_steps()) {
    const int middle = low + (high - low) / 2;
    (refutes(middle * step) ? low : high) = middle;
  }
  return std::max(proved, low * step);
}

std::optional<StartWindows> start_windows(const BoundProblem& problem,
                                          double end,
                                          int64_t max_steps) {
  Windows windows(problem, stage_costs(problem.costs, problem.placement.num_stages()), max_steps);
  if (!windows.narrow(end)) return std::nullopt;
  StartWindows starts;
  windows.append_starts(0, starts.earliest_forward, starts.latest_forward);
  windows.append_starts(1, starts.earliest_backward, starts.latest_backward);
  return starts;
}

}  // namespace megacore::pipeline
