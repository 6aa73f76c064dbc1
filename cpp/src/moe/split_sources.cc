#include "split_sources.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "megacore/base/vector_clones.h"

namespace megacore::moe {
namespace {

// Products below this bound, and so their quotients by a number below it, are exact when rounded
// down from doubles: a quotient just below an integer q = (a + 1) / b differs from it by 1 / b,
// which is more than half of the distance between doubles there.
constexpr double kExactProduct = 9007199254740992.0;  // 2^53

// Numbers of the clones in use, in the order of their slots.
struct Shares {
  std::vector<int64_t> own = {};     // tokens of the clone's own rank
  std::vector<double> missing = {};  // tokens it still needs
  std::vector<double> total = {};    // tokens of the expert that sources have left, at least 1
  std::vector<int64_t> given = {};   // proportional shares of all sources
};

// Counts are below 2^52: as the low bits of a double between 2^52 and 2^53 they need no conversion,
// for which AVX2 has no instruction.
MC_VECTOR_CLONES_V4 void to_doubles(const int64_t* __restrict__ from,
                                    int64_t numel,
                                    double* __restrict__ to) {
  constexpr double kBase = 4503599627370496.0;  // 2^52
  for (int64_t i = 0; i < numel; ++i) {
    to[i] = std::bit_cast<double>(std::bit_cast<int64_t>(kBase) | from[i]) - kBase;
  }
}

// parts[i] = floor(left[expert[i]] * missing[i] / total[i]), added to given[i].
MC_VECTOR_CLONES_V4 void take_shares(const double* __restrict__ left,
                                     const int32_t* __restrict__ expert,
                                     const double* __restrict__ missing,
                                     const double* __restrict__ total,
                                     int64_t num_clones,
                                     int32_t* __restrict__ parts,
                                     int64_t* __restrict__ given) {
  for (int64_t i = 0; i < num_clones; ++i) {
    const auto part = static_cast<int32_t>(left[expert[i]] * missing[i] / total[i]);
    parts[i] = part;
    given[i] += part;
  }
}

// As take_shares for products that doubles cannot represent.
void take_large_shares(const double* left, const int32_t* expert, Shares& shares, int32_t* parts) {
  for (size_t i = 0; i < shares.given.size(); ++i) {
    const auto part = static_cast<int32_t>(proportional_floor(
        static_cast<int64_t>(left[expert[i]]), static_cast<int64_t>(shares.missing[i]),
        static_cast<int64_t>(shares.total[i])));
    parts[i] = part;
    shares.given[i] += part;
  }
}

class SourceSplit {
 public:
  SourceSplit(const PlanShape& shape,
              const int64_t* counts,
              const SlotTable& chosen,
              SourceTokens& result)
      : s_(shape),
        counts_(counts),
        chosen_(chosen),
        c_(result),
        left_(static_cast<size_t>(shape.num_experts)),
        stays_(static_cast<size_t>(shape.num_experts), 0) {}

  // A clone first gets the tokens of its own rank and the home expert keeps those of its own rank,
  // if the plan is balanced.
  void list_clones(bool is_balanced, const int64_t* experts) {
    std::vector<int64_t> left(experts, experts + s_.num_experts);
    std::vector<int64_t> moved(left.size(), 0);
    for (int64_t slot = 0; slot < s_.num_slots(); ++slot) {
      const int64_t expert = chosen_.expert[slot];
      if (expert >= 0) {
        const int64_t tokens = chosen_.tokens[slot];
        const int64_t own =
            is_balanced ? smaller(count(slot / s_.num_spare_slots, expert), tokens) : 0;
        c_.slot.push_back(slot);
        c_.expert.push_back(static_cast<int32_t>(expert));
        shares_.own.push_back(own);
        shares_.missing.push_back(static_cast<double>(tokens - own));
        moved[static_cast<size_t>(expert)] += tokens;
        left[static_cast<size_t>(expert)] -= own;
      }
    }
    for (size_t e = 0; e < left.size(); ++e) {
      if (is_balanced && moved[e] > 0) {
        const auto expert = static_cast<int64_t>(e);
        stays_[e] = smaller(count(s_.home(expert), expert), experts[e] - moved[e]);
        left[e] -= stays_[e];
      }
    }
    for (size_t i = 0; i < c_.num_clones(); ++i) {
      const auto total = static_cast<double>(left[static_cast<size_t>(c_.expert[i])]);
      shares_.total.push_back(std::max(total, 1.0));
      is_exact_ &= total * shares_.missing[i] < kExactProduct;
    }
    shares_.given.resize(c_.num_clones(), 0);
    c_.tokens = std::make_unique_for_overwrite<int32_t[]>(static_cast<size_t>(s_.num_ranks) *
                                                          c_.num_clones());
  }

  // Proportional shares, rounded down.
  void share() {
    const auto num_clones = static_cast<int64_t>(c_.num_clones());
    for (int64_t source = 0; source < s_.num_ranks; ++source) {
      find_left(source);
      if (is_exact_) {
        take_shares(left_.data(), c_.expert.data(), shares_.missing.data(), shares_.total.data(),
                    num_clones, row_of(source), shares_.given.data());
      } else {
        take_large_shares(left_.data(), c_.expert.data(), shares_, row_of(source));
      }
    }
  }

  // The remainder, source by source; clones of one expert in the order of their slots.
  void share_remainder() {
    std::vector<Queue> open = queues();
    for (int64_t source = 0; source < s_.num_ranks && !open.empty(); ++source) {
      find_left(source);
      int32_t* row = row_of(source);
      std::erase_if(open, [&](Queue& queue) { return serve(queue, row); });
    }
  }

  void add_own() {
    for (size_t i = 0; i < c_.num_clones(); ++i) {
      row_of(c_.slot[i] / s_.num_spare_slots)[i] += static_cast<int32_t>(shares_.own[i]);
    }
  }

 private:
  // Clones [begin, end) of by_expert_ of one expert; those before `at` have all their tokens.
  struct Queue {
    size_t begin, at, end;
    int64_t missing;  // of clone `at`
  };

  int64_t count(int64_t source, int64_t expert) const {
    return counts_[source * s_.num_experts + expert];
  }
  int32_t* row_of(int64_t source) const {
    return c_.tokens.get() + static_cast<size_t>(source) * c_.num_clones();
  }
  int64_t missing_after(size_t clone) const {
    return static_cast<int64_t>(shares_.missing[clone]) - shares_.given[clone];
  }

  // Tokens of the source for each expert that neither its own clones nor its home experts take.
  void find_left(int64_t source) {
    const int64_t* row = counts_ + source * s_.num_experts;
    to_doubles(row, s_.num_experts, left_.data());
    const int64_t first = source * s_.experts_per_rank();
    for (int64_t e = first; e < first + s_.experts_per_rank(); ++e) {
      left_[static_cast<size_t>(e)] -= static_cast<double>(stays_[static_cast<size_t>(e)]);
    }
    const int64_t first_slot = source * s_.num_spare_slots;
    auto found = std::lower_bound(c_.slot.begin(), c_.slot.end(), first_slot);
    for (; found != c_.slot.end() && *found < first_slot + s_.num_spare_slots; ++found) {
      const auto clone = static_cast<size_t>(found - c_.slot.begin());
      left_[static_cast<size_t>(c_.expert[clone])] -= static_cast<double>(shares_.own[clone]);
    }
  }

  // One queue for each expert whose clones miss tokens.
  std::vector<Queue> queues() {
    by_expert_.resize(c_.num_clones());
    for (size_t i = 0; i < by_expert_.size(); ++i) {
      by_expert_[i] = i;
    }
    std::stable_sort(by_expert_.begin(), by_expert_.end(),
                     [&](size_t a, size_t b) { return c_.expert[a] < c_.expert[b]; });
    std::vector<Queue> found;
    for (size_t begin = 0, end = 0; begin < by_expert_.size(); begin = end) {
      const int32_t expert = c_.expert[by_expert_[begin]];
      while (end < by_expert_.size() && c_.expert[by_expert_[end]] == expert) {
        ++end;
      }
      Queue queue{begin, begin, end, missing_after(by_expert_[begin])};
      skip_served(queue);
      if (queue.at < queue.end) {
        found.push_back(queue);
      }
    }
    return found;
  }

  void skip_served(Queue& queue) const {
    while (queue.missing == 0 && ++queue.at < queue.end) {
      queue.missing = missing_after(by_expert_[queue.at]);
    }
  }

  // Gives what is left of a source after its proportional shares. True if no clone misses tokens.
  bool serve(Queue& queue, int32_t* row) const {
    auto left =
        static_cast<int64_t>(left_[static_cast<size_t>(c_.expert[by_expert_[queue.begin]])]);
    for (size_t i = queue.begin; i < queue.end; ++i) {
      left -= row[by_expert_[i]];
    }
    while (left > 0 && queue.at < queue.end) {
      const int64_t taken = smaller(left, queue.missing);
      row[by_expert_[queue.at]] += static_cast<int32_t>(taken);
      left -= taken;
      queue.missing -= taken;
      skip_served(queue);
    }
    return queue.at == queue.end;
  }

  PlanShape s_;
  const int64_t* counts_;
  SlotTable chosen_;
  SourceTokens& c_;
  Shares shares_;
  std::vector<double> left_;    // (expert,) of one source
  std::vector<int64_t> stays_;  // (expert,) tokens of the home rank that the home expert keeps
  std::vector<size_t> by_expert_;
  bool is_exact_ = true;
};

}  // namespace

SourceTokens split_sources(const PlanShape& shape,
                           bool is_balanced,
                           const int64_t* counts,
                           const int64_t* experts,
                           const SlotTable& chosen) {
  SourceTokens result;
  SourceSplit split(shape, counts, chosen, result);
  split.list_clones(is_balanced, experts);
  split.share();
  split.share_remainder();
  split.add_own();
  return result;
}

}  // namespace megacore::moe
