#include "megacore/graph/capture_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace megacore::graph {
namespace {

using Tensor = std::pair<int64_t, int64_t>;  // layer and microbatch

struct Case {
  std::vector<double> entries = {};
  CaptureSpec spec = {};
};

// A random legal order: at each point any pass that may come next, with a bound on how many
// microbatches of a chunk are live.
Case random_case(std::mt19937_64& random) {
  const auto draw = [&random](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  Case made;
  const int64_t num_chunks = draw(1, 3);
  const int64_t num_microbatches = draw(1, 8);
  const int64_t most_live = draw(1, 5);
  std::vector<std::array<int64_t, 3>> done(static_cast<std::size_t>(num_chunks), {0, 0, 0});
  std::vector<bool> splits;
  for (int64_t c = 0; c < num_chunks; ++c) {
    splits.push_back(draw(0, 1) == 1);
    made.spec.layers_per_chunk.push_back(draw(1, 3));
    for (int64_t l = 0; l < made.spec.layers_per_chunk.back(); ++l) {
      made.spec.input_signature.push_back(draw(0, 1));
      made.spec.output_signature.push_back(draw(0, 1));
    }
  }
  while (true) {
    std::vector<double> next;
    for (std::size_t c = 0; c < done.size(); ++c) {
      const auto [forward, backward, weight] = done[c];
      const double name = static_cast<double>(c) + 1;
      const int64_t finished = splits[c] ? weight : backward;
      if (forward < num_microbatches && forward - finished < most_live) {
        next.push_back(name);
      }
      if (backward < forward) {
        next.push_back(-name);
      }
      if (splits[c] && weight < backward) {
        next.push_back(-name - 0.5);
      }
    }
    if (next.empty()) {
      return made;
    }
    const double entry =
        next[static_cast<std::size_t>(draw(0, static_cast<int64_t>(next.size()) - 1))];
    made.entries.push_back(entry);
    const bool is_half = entry != static_cast<double>(static_cast<int64_t>(entry));
    const auto chunk = static_cast<std::size_t>(std::abs(static_cast<int64_t>(entry))) - 1;
    ++done[chunk][entry > 0 ? 0 : is_half ? 2 : 1];
  }
}

// Replays a plan and looks at what lies in each buffer when it is read. Knows nothing of lives.
class Replayer {
 public:
  explicit Replayer(const CapturePlan& plan) : plan_(plan) {
    for (const BufferUse& use : plan.uses) {
      buffer_[{use.role, {use.layer, use.microbatch}}] = use.buffer;
    }
  }

  // An empty text, or the first read that finds another tensor.
  std::string run() {
    for (std::size_t i = 0; i < plan_.order.steps.size(); ++i) {
      const OrderStep& step = plan_.order.steps[i];
      if (step.kind == StepKind::kBackward && sent_) {
        read(Role::kInputGrad, *sent_);  // whoever takes a chunk's input gradient has it by now
        sent_.reset();
      }
      std::optional<Tensor> after;
      for (int64_t r = plan_.replay_start[i]; r < plan_.replay_start[i + 1]; ++r) {
        const Capture& graph =
            plan_.captures[static_cast<std::size_t>(plan_.replay[static_cast<std::size_t>(r)])];
        const Tensor tensor = {graph.layer, step.microbatch};
        EXPECT_EQ(graph.kind, step.kind);
        EXPECT_EQ(graph.chunk, step.chunk);
        if (step.kind == StepKind::kForward) {
          write(graph, Role::kInput, tensor);
          write(graph, Role::kOutput, tensor);
          continue;
        }
        if (step.kind == StepKind::kBackward) {
          if (after) {
            read(Role::kInputGrad, *after);
          }
          write(graph, Role::kOutputGrad, tensor);
        }
        for (const Role role : {Role::kInput, Role::kOutput, Role::kOutputGrad}) {
          EXPECT_EQ(graph.buffers[static_cast<std::size_t>(role)], (buffer_.at({role, tensor})));
          read(role, tensor);
        }
        if (step.kind == StepKind::kBackward) {
          write(graph, Role::kInputGrad, tensor);
          after = tensor;
          if (splits(step)) {
            write(graph, Role::kKept, tensor);
          }
        }
        if (step.kind == StepKind::kBackwardWeight) {
          EXPECT_EQ(graph.buffers[static_cast<std::size_t>(Role::kKept)],
                    (buffer_.at({Role::kKept, tensor})));
          read(Role::kKept, tensor);
        }
      }
      if (step.kind == StepKind::kBackward) {
        sent_ = after;
      }
    }
    if (sent_) {
      read(Role::kInputGrad, *sent_);
    }
    return fault_;
  }

 private:
  bool splits(const OrderStep& step) const {
    return plan_.order.splits_backward[static_cast<std::size_t>(step.chunk)];
  }

  void write(const Capture& graph, Role role, const Tensor& tensor) {
    const int64_t buffer = graph.buffers[static_cast<std::size_t>(role)];
    EXPECT_EQ(buffer, (buffer_.at({role, tensor})));
    content_[{role, buffer}] = tensor;
  }

  void read(Role role, const Tensor& tensor) {
    const Tensor found = content_[{role, buffer_.at({role, tensor})}];
    if (found != tensor && fault_.empty()) {
      fault_ = "role " + std::to_string(static_cast<int>(role)) + " of layer " +
               std::to_string(tensor.first) + ", microbatch " + std::to_string(tensor.second) +
               " holds that of microbatch " + std::to_string(found.second);
    }
  }

  const CapturePlan& plan_;
  std::map<std::pair<Role, Tensor>, int64_t> buffer_;
  std::map<std::pair<Role, int64_t>, Tensor> content_;
  std::optional<Tensor> sent_;
  std::string fault_;
};

std::size_t num_buffers(const CapturePlan& plan, Role role) {
  return plan.buffer_signature[static_cast<std::size_t>(role)].size();
}

TEST(CapturePlan, NoBufferIsOverwrittenWhileItIsNeeded) {
  std::mt19937_64 random(7);
  for (int trial = 0; trial < 3000; ++trial) {
    Case made = random_case(random);
    for (const Reuse reuse : {Reuse::kNone, Reuse::kBuffers, Reuse::kGraphs}) {
      made.spec.reuse = reuse;
      const CapturePlan plan = plan_capture(parse_order(made.entries), made.spec);
      ASSERT_EQ(Replayer(plan).run(), "")
          << order_text(plan.order) << ", reuse " << static_cast<int>(reuse);
    }
  }
}

TEST(CapturePlan, TheReplayerFindsABufferTakenTooEarly) {
  const CaptureSpec spec = {.layers_per_chunk = {1},
                            .input_signature = {0},
                            .output_signature = {0},
                            .reuse = Reuse::kGraphs};
  CapturePlan plan = plan_capture(parse_order(std::vector<double>{1, 1, -1, -1}), spec);
  ASSERT_EQ(num_buffers(plan, Role::kInput), 2U);
  for (Capture& graph : plan.captures) {
    graph.buffers[0] = 0;
  }
  for (BufferUse& use : plan.uses) {
    use.buffer = use.role == Role::kInput ? 0 : use.buffer;
  }
  EXPECT_EQ(Replayer(plan).run(), "role 0 of layer 0, microbatch 0 holds that of microbatch 1");
}

TEST(CapturePlan, TheReplayerFindsWhatAWeightHalfNeedsOverwritten) {
  const CaptureSpec spec = {.layers_per_chunk = {1},
                            .input_signature = {0},
                            .output_signature = {0},
                            .reuse = Reuse::kBuffers};
  CapturePlan plan = plan_capture(parse_order(std::vector<double>{1, 1, -1, -1, -1.5, -1.5}), spec);
  ASSERT_EQ(num_buffers(plan, Role::kKept), 2U);
  ASSERT_EQ(Replayer(plan).run(), "");
  for (Capture& graph : plan.captures) {
    auto& kept = graph.buffers[static_cast<std::size_t>(Role::kKept)];
    kept = std::min<int64_t>(kept, 0);
  }
  for (BufferUse& use : plan.uses) {
    use.buffer = use.role == Role::kKept ? 0 : use.buffer;
  }
  EXPECT_EQ(Replayer(plan).run(), "role 4 of layer 0, microbatch 0 holds that of microbatch 1");
}

TEST(CapturePlan, OnlySplitChunksKeepSomethingForTheirWeightHalves) {
  const std::vector<double> entries = {1, 2, -2, -1, -1.5, 1, 2, -2, -1, -1.5};
  for (const Reuse reuse : {Reuse::kNone, Reuse::kBuffers, Reuse::kGraphs}) {
    const CaptureSpec spec = {.layers_per_chunk = {2, 1},
                              .input_signature = {0, 0, 0},
                              .output_signature = {0, 0, 0},
                              .reuse = reuse};
    const CapturePlan plan = plan_capture(parse_order(entries), spec);
    const std::vector<int64_t> expected =
        reuse == Reuse::kNone ? std::vector<int64_t>{0, 0, 1, 1} : std::vector<int64_t>{0, 1};
    std::vector<int64_t> found = plan.buffer_signature[static_cast<std::size_t>(Role::kKept)];
    std::ranges::sort(found);
    EXPECT_EQ(found, expected);
  }
}

TEST(CapturePlan, PooledBuffersAreAsFewAsArePossible) {
  std::mt19937_64 random(11);
  for (int trial = 0; trial < 1000; ++trial) {
    Case made = random_case(random);
    made.spec.reuse = Reuse::kBuffers;
    const CapturePlan plan = plan_capture(parse_order(made.entries), made.spec);
    const auto num_steps = static_cast<int64_t>(plan.order.steps.size());
    for (const int64_t signature : {0, 1}) {
      std::size_t needed = 0;
      for (int64_t position = 0; position < num_steps; ++position) {
        const auto live = std::ranges::count_if(plan.uses, [&](const BufferUse& use) {
          return use.role == Role::kInput && use.written <= position && position <= use.last_read &&
                 made.spec.input_signature[static_cast<std::size_t>(use.layer)] == signature;
        });
        needed = std::max(needed, static_cast<std::size_t>(live));
      }
      const auto& signatures = plan.buffer_signature[0];
      // Within a backward step the layers release one after the other and nothing is taken.
      EXPECT_EQ(static_cast<std::size_t>(std::ranges::count(signatures, signature)), needed);
    }
  }
}

TEST(CapturePlan, WithoutPipeliningTwoGraphsPerLayerServeAllMicrobatches) {
  std::vector<double> entries;
  for (int m = 0; m < 16; ++m) {
    entries.insert(entries.end(), {1, -1});
  }
  const CaptureSpec spec = {.layers_per_chunk = {3},
                            .input_signature = {0, 0, 0},
                            .output_signature = {0, 0, 0},
                            .reuse = Reuse::kGraphs};
  const CapturePlan plan = plan_capture(parse_order(entries), spec);
  EXPECT_EQ(plan.captures.size(), 6U);
  EXPECT_EQ(num_buffers(plan, Role::kInput), 3U);
  EXPECT_EQ(num_buffers(plan, Role::kOutputGrad), 1U);
  EXPECT_EQ(plan.replay.size(), 6U * 16U);
}

TEST(CapturePlan, ALateWeightHalfKeepsItsInput) {
  const std::vector<double> entries = {1, -1, 1, -1, -1.5, -1.5};
  const CaptureSpec spec = {.layers_per_chunk = {1},
                            .input_signature = {0},
                            .output_signature = {0},
                            .reuse = Reuse::kBuffers};
  const CapturePlan plan = plan_capture(parse_order(entries), spec);
  EXPECT_EQ(num_buffers(plan, Role::kInput), 2U);
  EXPECT_EQ(plan.uses[0].last_read, 4);
  EXPECT_EQ(plan.captures.size(), 6U);
}

TEST(CapturePlan, ForwardPassesOfARingAreCapturedFirst) {
  const CaptureSpec spec = {.layers_per_chunk = {1},
                            .input_signature = {0},
                            .output_signature = {0},
                            .reuse = Reuse::kGraphs};
  const CapturePlan plan =
      plan_capture(parse_order(std::vector<double>{1, 1, -1, 1, -1, -1}), spec);
  std::vector<StepKind> kinds;
  for (const Capture& graph : plan.captures) {
    kinds.push_back(graph.kind);
  }
  EXPECT_EQ(kinds, (std::vector<StepKind>{StepKind::kForward, StepKind::kForward,
                                          StepKind::kBackward, StepKind::kBackward}));
}

TEST(CapturePlan, RefusesASpecForAnotherModel) {
  const Order order = parse_order(std::vector<double>{1, -1});
  EXPECT_THROW(plan_capture(order, {}), std::invalid_argument);
  EXPECT_THROW(plan_capture(order, {.layers_per_chunk = {0}}), std::invalid_argument);
  EXPECT_THROW(plan_capture(order, {.layers_per_chunk = {1}, .input_signature = {0}}),
               std::invalid_argument);
  EXPECT_THROW(reuse_named("all"), std::invalid_argument);
  EXPECT_EQ(reuse_named("buffers"), Reuse::kBuffers);
}

}  // namespace
}  // namespace megacore::graph
