#include "megacore/graph/order.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <sstream>

#include "megacore/base/check.h"

namespace megacore::graph {
namespace {

constexpr int64_t kMaxChunks = 4096;

std::string entry_text(double entry) {
  std::ostringstream stream;
  stream << entry;
  return stream.str();
}

// The list around a position, which stands in brackets.
std::string marked(std::span<const double> entries, std::size_t position) {
  constexpr std::size_t kAround = 8;
  const std::size_t first = position > kAround ? position - kAround : 0;
  const std::size_t last = std::min(entries.size(), position + kAround + 1);
  std::string text = first > 0 ? "... " : "";
  for (std::size_t i = first; i < last; ++i) {
    const std::string entry = entry_text(entries[i]);
    text += (i > first ? " " : "") + (i == position ? "[" + entry + "]" : entry);
  }
  return text + (last < entries.size() ? " ..." : "");
}

// Passes of one chunk so far.
struct Counts {
  int64_t forward = 0;
  int64_t backward = 0;
  int64_t weight = 0;
};

class Parser {
 public:
  explicit Parser(std::span<const double> entries) : entries_(entries) {}

  Order parse() {
    MC_REQUIRE(!entries_.empty(), "the order list is empty; it needs at least 1 and -1");
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      add(i);
    }
    finish();
    return std::move(order_);
  }

 private:
  void add(std::size_t position) {
    const double entry = entries_[position];
    const double twice = 2 * entry;
    const bool is_half =
        std::isfinite(entry) && twice == std::floor(twice) && std::fmod(std::fabs(twice), 2) == 1;
    const bool is_whole = std::isfinite(entry) && entry == std::floor(entry);
    MC_REQUIRE((is_whole && entry != 0) || (is_half && entry < -1),
               "{} names no step; steps are +c (forward), -c (backward) and -c-0.5 (weight half) "
               "of chunk c = 1, 2, ...",
               at(position));
    const auto chunk = static_cast<int64_t>(std::floor(std::fabs(entry))) - 1;
    MC_REQUIRE(chunk < kMaxChunks, "{} is above the limit of {} chunks", at(position), kMaxChunks);
    if (static_cast<std::size_t>(chunk) >= counts_.size()) {
      counts_.resize(static_cast<std::size_t>(chunk) + 1);
    }
    Counts& counts = counts_[static_cast<std::size_t>(chunk)];
    if (entry > 0) {
      order_.steps.push_back({StepKind::kForward, chunk, counts.forward++});
    } else if (is_half) {
      MC_REQUIRE(counts.weight < counts.backward,
                 "{} is a weight half without a backward pass of chunk {} left to complete: {} "
                 "backward passes and {} halves came before it",
                 at(position), chunk + 1, counts.backward, counts.weight);
      order_.steps.push_back({StepKind::kBackwardWeight, chunk, counts.weight++});
    } else {
      MC_REQUIRE(counts.backward < counts.forward,
                 "{} is a backward pass without a forward pass of chunk {} left to undo: {} "
                 "forward and {} backward passes came before it",
                 at(position), chunk + 1, counts.forward, counts.backward);
      order_.steps.push_back({StepKind::kBackward, chunk, counts.backward++});
    }
  }

  void finish() {
    order_.num_chunks = static_cast<int64_t>(counts_.size());
    order_.num_microbatches = counts_[0].forward;
    for (std::size_t c = 0; c < counts_.size(); ++c) {
      const Counts& counts = counts_[c];
      MC_REQUIRE(counts.forward == order_.num_microbatches && counts.forward > 0,
                 "chunk {} has {} forward passes and chunk 1 has {}; every chunk runs every "
                 "microbatch, at least one",
                 c + 1, counts.forward, order_.num_microbatches);
      MC_REQUIRE(counts.backward == counts.forward,
                 "chunk {} has {} forward passes (+{}) and {} backward passes (-{}); each forward "
                 "pass needs one",
                 c + 1, counts.forward, c + 1, counts.backward, c + 1);
      MC_REQUIRE(
          counts.weight == 0 || counts.weight == counts.backward,
          "chunk {} has {} backward passes and {} weight halves (-{}.5); split all of them or none",
          c + 1, counts.backward, counts.weight, c + 1);
      order_.splits_backward.push_back(counts.weight > 0);
    }
  }

  std::string at(std::size_t position) const {
    return base::format_text("order position {}: {} in {}", position,
                             entry_text(entries_[position]), marked(entries_, position));
  }

  std::span<const double> entries_;
  std::vector<Counts> counts_;
  Order order_;
};

}  // namespace

Order parse_order(std::span<const double> entries) { return Parser(entries).parse(); }

std::string order_text(const Order& order) {
  std::string text;
  for (const OrderStep& step : order.steps) {
    text += text.empty() ? "" : " ";
    text += step.kind == StepKind::kForward ? "" : "-";
    text += std::to_string(step.chunk + 1);
    text += step.kind == StepKind::kBackwardWeight ? ".5" : "";
  }
  return text;
}

}  // namespace megacore::graph
