#include "megacore/graph/capture_plan.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <map>
#include <string>
#include <utility>

#include "megacore/base/check.h"

namespace megacore::graph {
namespace {

constexpr std::array<Role, kNumRoles> kRoles = {Role::kInput, Role::kOutput, Role::kOutputGrad,
                                                Role::kInputGrad, Role::kKept};

std::size_t index(Role role) { return static_cast<std::size_t>(role); }

// One replay in a step: a layer's pass at a time that counts through all layers of all steps.
struct Pass {
  StepKind kind = StepKind::kForward;
  int64_t layer = 0;
  int64_t microbatch = 0;
  int64_t position = 0;  // in the order list
};

// The first and last pass (inclusive) in which a tensor must stay put; -1 if there is no such
// tensor.
struct Life {
  int64_t first = -1;
  int64_t last = -1;
};

class Planner {
 public:
  Planner(const Order& order, const CaptureSpec& spec) : spec_(spec) {
    plan_.order = order;
    check_spec();
    list_passes();
    find_lives();
    find_peaks();
  }

  CapturePlan plan() {
    switch (spec_.reuse) {
      case Reuse::kNone:
        own_buffers();
        break;
      case Reuse::kBuffers:
        pooled_buffers();
        break;
      case Reuse::kGraphs:
        ring_buffers();
        break;
    }
    list_captures();
    list_uses();
    return std::move(plan_);
  }

 private:
  void check_spec() {
    const auto num_chunks = static_cast<std::size_t>(plan_.order.num_chunks);
    MC_REQUIRE(
        spec_.layers_per_chunk.size() == num_chunks,
        "layers_per_chunk has {} entries, but the order list has {} chunks; give one per chunk",
        spec_.layers_per_chunk.size(), num_chunks);
    for (std::size_t c = 0; c < num_chunks; ++c) {
      MC_REQUIRE(spec_.layers_per_chunk[c] >= 1,
                 "chunk {} has {} layers to capture; it must have at least 1", c + 1,
                 spec_.layers_per_chunk[c]);
      first_layer_.push_back(num_layers_);
      for (int64_t l = 0; l < spec_.layers_per_chunk[c]; ++l) {
        chunk_of_.push_back(static_cast<int64_t>(c));
      }
      num_layers_ += spec_.layers_per_chunk[c];
    }
    for (const auto* signature : {&spec_.input_signature, &spec_.output_signature}) {
      MC_REQUIRE(static_cast<int64_t>(signature->size()) == num_layers_,
                 "there are {} {} signatures for {} layers; give one per layer", signature->size(),
                 signature == &spec_.input_signature ? "input" : "output", num_layers_);
    }
  }

  int64_t key(int64_t layer, int64_t microbatch) const {
    return layer * plan_.order.num_microbatches + microbatch;
  }

  void list_passes() {
    const auto size = static_cast<std::size_t>(num_layers_ * plan_.order.num_microbatches);
    for (auto& times : time_of_) {
      times.assign(size, -1);
    }
    plan_.replay_start.push_back(0);
    for (std::size_t i = 0; i < plan_.order.steps.size(); ++i) {
      const OrderStep& step = plan_.order.steps[i];
      const int64_t first = first_layer_[static_cast<std::size_t>(step.chunk)];
      const int64_t count = spec_.layers_per_chunk[static_cast<std::size_t>(step.chunk)];
      for (int64_t l = 0; l < count; ++l) {
        const bool ascends = step.kind == StepKind::kForward;
        const int64_t layer = ascends ? first + l : first + count - 1 - l;
        time(step.kind, layer, step.microbatch) = static_cast<int64_t>(passes_.size());
        passes_.push_back({step.kind, layer, step.microbatch, static_cast<int64_t>(i)});
      }
      plan_.replay_start.push_back(static_cast<int64_t>(passes_.size()));
    }
  }

  int64_t& time(StepKind kind, int64_t layer, int64_t microbatch) {
    return time_of_[static_cast<std::size_t>(kind)]
                   [static_cast<std::size_t>(key(layer, microbatch))];
  }

  bool splits(int64_t layer) const {
    return plan_.order
        .splits_backward[static_cast<std::size_t>(chunk_of_[static_cast<std::size_t>(layer)])];
  }

  bool is_first_of_chunk(int64_t layer) const {
    return layer == 0 || chunk_of_[static_cast<std::size_t>(layer)] !=
                             chunk_of_[static_cast<std::size_t>(layer) - 1];
  }

  // By role and (layer, microbatch).
  void find_lives() {
    const std::vector<int64_t> until = before_next_backward();
    for (auto& lives : lives_) {
      lives.resize(time_of_[0].size());
    }
    for (int64_t layer = 0; layer < num_layers_; ++layer) {
      for (int64_t m = 0; m < plan_.order.num_microbatches; ++m) {
        const int64_t forward = time(StepKind::kForward, layer, m);
        const int64_t backward = time(StepKind::kBackward, layer, m);
        const int64_t last = splits(layer) ? time(StepKind::kBackwardWeight, layer, m) : backward;
        const auto position =
            static_cast<std::size_t>(passes_[static_cast<std::size_t>(backward)].position);
        life(Role::kInput, layer, m) = {forward, last};
        life(Role::kOutput, layer, m) = {forward, last};
        life(Role::kOutputGrad, layer, m) = {backward, last};
        life(Role::kInputGrad, layer, m) = {
            backward, is_first_of_chunk(layer) ? until[position] : backward + 1};
        if (splits(layer)) {
          life(Role::kKept, layer, m) = {backward, last};
        }
      }
    }
  }

  Life& life(Role role, int64_t layer, int64_t microbatch) {
    return lives_[index(role)][static_cast<std::size_t>(key(layer, microbatch))];
  }

  // By order position: the last pass before the next backward step after it.
  std::vector<int64_t> before_next_backward() const {
    const auto& steps = plan_.order.steps;
    std::vector<int64_t> until(steps.size());
    int64_t next = static_cast<int64_t>(passes_.size()) - 1;
    for (std::size_t i = steps.size(); i-- > 0;) {
      until[i] = next;
      if (steps[i].kind == StepKind::kBackward) {
        next = plan_.replay_start[i] - 1;
      }
    }
    return until;
  }

  void find_peaks() {
    plan_.peak_per_chunk.assign(static_cast<std::size_t>(plan_.order.num_chunks), 0);
    std::vector<int64_t> live(plan_.peak_per_chunk.size(), 0);
    for (const OrderStep& step : plan_.order.steps) {
      const auto chunk = static_cast<std::size_t>(step.chunk);
      const StepKind last =
          plan_.order.splits_backward[chunk] ? StepKind::kBackwardWeight : StepKind::kBackward;
      live[chunk] += step.kind == StepKind::kForward ? 1 : step.kind == last ? -1 : 0;
      plan_.peak_per_chunk[chunk] = std::max(plan_.peak_per_chunk[chunk], live[chunk]);
    }
    plan_.slots_per_chunk = plan_.peak_per_chunk;
    if (spec_.reuse != Reuse::kGraphs) {
      std::ranges::fill(plan_.slots_per_chunk, plan_.order.num_microbatches);
    }
  }

  int64_t slot(int64_t layer, int64_t microbatch) const {
    return microbatch % plan_.slots_per_chunk[static_cast<std::size_t>(
                            chunk_of_[static_cast<std::size_t>(layer)])];
  }

  bool exists(Role role, int64_t layer) const { return role != Role::kKept || splits(layer); }

  int64_t signature(Role role, int64_t layer) const {
    if (role == Role::kKept) {
      return layer;
    }
    const bool is_input = role == Role::kInput || role == Role::kInputGrad;
    return (is_input ? spec_.input_signature
                     : spec_.output_signature)[static_cast<std::size_t>(layer)];
  }

  int64_t add_buffer(Role role, int64_t buffer_signature) {
    auto& signatures = plan_.buffer_signature[index(role)];
    signatures.push_back(buffer_signature);
    return static_cast<int64_t>(signatures.size()) - 1;
  }

  void own_buffers() {
    for (const Role role : kRoles) {
      auto& buffers = buffers_[index(role)];
      for (int64_t layer = 0; layer < num_layers_; ++layer) {
        for (int64_t m = 0; m < plan_.order.num_microbatches; ++m) {
          buffers.push_back(exists(role, layer) ? add_buffer(role, signature(role, layer)) : -1);
        }
      }
    }
  }

  // A released buffer is taken again, oldest first, by the next tensor of its signature.
  void pooled_buffers() {
    for (const Role role : kRoles) {
      const auto& lives = lives_[index(role)];
      auto& buffers = buffers_[index(role)];
      buffers.assign(lives.size(), -1);
      std::vector<int64_t> by_start;
      for (std::size_t i = 0; i < lives.size(); ++i) {
        if (lives[i].first >= 0) {
          by_start.push_back(static_cast<int64_t>(i));
        }
      }
      std::vector<int64_t> by_end = by_start;
      const auto at = [&lives](int64_t i) { return lives[static_cast<std::size_t>(i)]; };
      std::ranges::sort(by_start, {}, [&at](int64_t i) { return at(i).first; });
      std::ranges::sort(by_end, {},
                        [&at](int64_t i) { return std::pair(at(i).last, at(i).first); });
      std::map<int64_t, std::deque<int64_t>> free;
      auto ended = by_end.begin();
      for (const int64_t i : by_start) {
        for (; ended != by_end.end() && at(*ended).last < at(i).first; ++ended) {
          free[signature(role, *ended / plan_.order.num_microbatches)].push_back(
              buffers[static_cast<std::size_t>(*ended)]);
        }
        const int64_t wanted = signature(role, i / plan_.order.num_microbatches);
        std::deque<int64_t>& pool = free[wanted];
        if (pool.empty()) {
          pool.push_back(add_buffer(role, wanted));
        }
        buffers[static_cast<std::size_t>(i)] = pool.front();
        pool.pop_front();
      }
    }
  }

  // Microbatches that share a graph share its buffers. Gradients that live within one step need
  // no set of their own: an output gradient without a weight half lives for one pass, and an input
  // gradient inside a chunk for two, so two buffers alternate.
  void ring_buffers() {
    std::map<std::array<int64_t, 4>, int64_t> made;
    for (const Role role : kRoles) {
      auto& buffers = buffers_[index(role)];
      for (int64_t layer = 0; layer < num_layers_; ++layer) {
        const bool is_brief = (role == Role::kOutputGrad && !splits(layer)) ||
                              (role == Role::kInputGrad && !is_first_of_chunk(layer));
        const int64_t shared = signature(role, layer);
        const int64_t parity = role == Role::kInputGrad ? layer % 2 : 0;
        for (int64_t m = 0; m < plan_.order.num_microbatches; ++m) {
          if (!exists(role, layer)) {
            buffers.push_back(-1);
            continue;
          }
          const std::array<int64_t, 4> name = {static_cast<int64_t>(role), is_brief ? -1 : layer,
                                               is_brief ? shared : slot(layer, m),
                                               is_brief ? parity : 0};
          auto [found, is_new] = made.try_emplace(name, 0);
          if (is_new) {
            found->second = add_buffer(role, shared);
          }
          buffers.push_back(found->second);
        }
      }
    }
  }

  void list_captures() {
    std::map<std::array<int64_t, 3>, int64_t> capture_of;
    const auto capture = [&](const Pass& pass) {
      const int64_t own_slot = slot(pass.layer, pass.microbatch);
      const std::array<int64_t, 3> name = {static_cast<int64_t>(pass.kind), pass.layer, own_slot};
      const auto [found, is_new] =
          capture_of.try_emplace(name, static_cast<int64_t>(plan_.captures.size()));
      if (is_new) {
        plan_.captures.push_back({pass.kind, pass.layer,
                                  chunk_of_[static_cast<std::size_t>(pass.layer)], own_slot,
                                  buffers_of(pass)});
      }
      return found->second;
    };
    // Slots of a ring are live together in any combination, so no capture may get memory that the
    // capture of another one has freed: all forward passes come first and keep theirs.
    if (spec_.reuse == Reuse::kGraphs) {
      for (const Pass& pass : passes_) {
        if (pass.kind == StepKind::kForward) {
          capture(pass);
        }
      }
    }
    for (const Pass& pass : passes_) {
      plan_.replay.push_back(capture(pass));
    }
  }

  std::array<int64_t, kNumRoles> buffers_of(const Pass& pass) const {
    const bool is_forward = pass.kind == StepKind::kForward;
    const bool makes_input_grad = pass.kind == StepKind::kBackward;
    std::array<int64_t, kNumRoles> used = {-1, -1, -1, -1, -1};
    for (const Role role : kRoles) {
      if (((role == Role::kOutputGrad || role == Role::kKept) && is_forward) ||
          (role == Role::kInputGrad && !makes_input_grad)) {
        continue;
      }
      used[index(role)] =
          buffers_[index(role)][static_cast<std::size_t>(key(pass.layer, pass.microbatch))];
    }
    return used;
  }

  void list_uses() {
    for (const Role role : kRoles) {
      for (int64_t layer = 0; layer < num_layers_; ++layer) {
        for (int64_t m = 0; m < plan_.order.num_microbatches; ++m) {
          const Life& tensor = life(role, layer, m);
          if (tensor.first < 0) {
            continue;
          }
          plan_.uses.push_back({role,
                                buffers_[index(role)][static_cast<std::size_t>(key(layer, m))],
                                layer, m, passes_[static_cast<std::size_t>(tensor.first)].position,
                                passes_[static_cast<std::size_t>(tensor.last)].position});
        }
      }
    }
  }

  const CaptureSpec& spec_;
  CapturePlan plan_;
  int64_t num_layers_ = 0;
  std::vector<int64_t> first_layer_;
  std::vector<int64_t> chunk_of_;
  std::vector<Pass> passes_;
  std::array<std::vector<int64_t>, 3> time_of_;  // by kind and (layer, microbatch)
  std::array<std::vector<Life>, kNumRoles> lives_;
  std::array<std::vector<int64_t>, kNumRoles> buffers_;
};

}  // namespace

Reuse reuse_named(std::string_view name) {
  if (name == "none") {
    return Reuse::kNone;
  }
  if (name == "buffers") {
    return Reuse::kBuffers;
  }
  MC_REQUIRE(name == "graphs",
             "reuse \"{}\" is unknown; the ways are none, buffers (own graphs) and graphs", name);
  return Reuse::kGraphs;
}

CapturePlan plan_capture(const Order& order, const CaptureSpec& spec) {
  return Planner(order, spec).plan();
}

}  // namespace megacore::graph
