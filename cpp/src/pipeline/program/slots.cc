#include <algorithm>
#include <numeric>
#include <optional>

#include "megacore/base/check.h"
#include "megacore/pipeline/program/passes.h"
#include "program/lifetimes.h"
#include "program/messages.h"

namespace megacore::pipeline {
namespace {

// Slots that become free are taken again in that order.
class SlotPool {
 public:
  int32_t take() {
    if (next_ < freed_.size()) return freed_[next_++];
    return count_++;
  }
  void free(int32_t slot) { freed_.push_back(slot); }

 private:
  std::vector<int32_t> freed_;
  size_t next_ = 0;
  int32_t count_ = 0;
};

// One kind of buffer of a rank: its pools, and who holds which slot.
class Buffers {
 public:
  Buffers(size_t num_pools, size_t num_pairs) : pools_(num_pools), held_(num_pairs, -1) {}

  int32_t take(size_t pool, size_t pair) { return held_[pair] = pools_[pool].take(); }
  int32_t held(size_t pair) const { return held_[pair]; }
  void free(size_t pool, size_t pair) {
    if (held_[pair] >= 0) pools_[pool].free(held_[pair]);
    held_[pair] = -1;
  }

 private:
  std::vector<SlotPool> pools_;
  std::vector<int32_t> held_;
};

// The largest slot of each pool plus one, over the steps that `matches` accepts.
template <typename Matches>
std::vector<int32_t> counts_of(const Program& program, const Matches& matches) {
  const SlotPools pools = program.passes.slots.value();
  std::vector<int32_t> counts(num_pools(program, pools), 0);
  for (const ProgramStep& step : program.steps) {
    if (!matches(step.action.kind)) continue;
    int32_t& count = counts[pool_of(program, step.action.stage, pools)];
    count = std::max(count, step.slot + 1);
  }
  return counts;
}

}  // namespace

Program assign_slots(Program program, SlotPools pools) {
  const PairIndex index(program);
  const size_t count = num_pools(program, pools);
  Buffers activations(count, index.size());
  Buffers inputs(count, index.size());
  Buffers gradients(count, index.size());
  for (ProgramStep& step : program.steps) {
    const Action& action = step.action;
    if (is_send(action.kind) || is_per_stage(action.kind)) continue;
    const size_t pool = pool_of(program, action.stage, pools);
    const size_t pair = index.of(action);
    if (is_recv(action.kind)) {
      Buffers& buffers = action.kind == ActionKind::kRecvForward ? inputs : gradients;
      step.slot = buffers.take(pool, pair);
      continue;
    }
    const bool forward = action.kind == ActionKind::kForward;
    step.slot = forward ? activations.take(pool, pair) : activations.held(pair);
    if (forward) inputs.free(pool, pair);
    if (frees_activation(action.kind)) gradients.free(pool, pair);
    if (frees_slot(action, program)) activations.free(pool, pair);
  }
  program.passes.slots = pools;
  return program;
}

SlotCounts count_slots(const Program& program) {
  MC_REQUIRE(program.passes.slots.has_value(),
             "the program of rank ",
             program.rank,
             " has no slots; assign them first");
  const auto is_kind = [](ActionKind wanted) {
    return [wanted](ActionKind kind) { return kind == wanted; };
  };
  SlotCounts counts{.activations = counts_of(program, is_kind(ActionKind::kForward)),
                    .inputs = counts_of(program, is_kind(ActionKind::kRecvForward)),
                    .gradients = counts_of(program, is_kind(ActionKind::kRecvBackward)),
                    .graph_pairs = 0};
  const auto num_chunks = program.placement.stages_of(program.rank).size();
  const auto num_slots =
      static_cast<size_t>(*std::max_element(counts.activations.begin(), counts.activations.end()));
  std::vector<uint8_t> used(num_chunks * num_slots, 0);
  for (const ProgramStep& step : program.steps) {
    if (step.action.kind != ActionKind::kForward) continue;
    const auto chunk = static_cast<size_t>(program.placement.chunk_of(step.action.stage));
    used[chunk * num_slots + static_cast<size_t>(step.slot)] = 1;
  }
  counts.graph_pairs = static_cast<int32_t>(std::accumulate(used.begin(), used.end(), 0));
  return counts;
}

}  // namespace megacore::pipeline
