// Planner of CUDA graphs for a schedule, and of their static buffers.
//
// A graph is one layer's forward pass, backward pass or weight half. It is captured once, on fixed
// addresses, and replayed for the microbatches that share it. Buffers that must persist:
//
//   role          written by         live until the end of
//   input         forward pass       the last pass that reads it: the weight half, or the backward
//                                    pass where it is whole
//   output        forward pass       the same
//   output grad   backward pass      the same
//   input grad    backward pass      the backward pass of the layer before; for the first layer of
//                                    a chunk, whose gradient leaves it, until the next backward
//                                    step
//   kept          backward pass      the weight half, which goes on from it; none where the
//   backward
//                                    pass is whole
//
// Source: the roles and the rule for a chunk's first layer are those of graph capture in
// Transformer Engine, with one difference: its inputs are free after the backward pass, although a
// later weight half still reads them.

#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "megacore/graph/order.h"

namespace megacore::graph {

enum class Role : int8_t { kInput, kOutput, kOutputGrad, kInputGrad, kKept };
inline constexpr int64_t kNumRoles = 5;

enum class Reuse {
  kNone,     // one graph and one set of buffers per layer and microbatch
  kBuffers,  // one graph per layer and microbatch; buffers go round, first released, first taken
  kGraphs,   // microbatch j of a chunk replays graph j mod K, K being its peak of live microbatches
};

// "none", "buffers", "graphs". Throws std::invalid_argument for any other name.
Reuse reuse_named(std::string_view name);

struct CaptureSpec {
  std::vector<int64_t> layers_per_chunk = {};
  // By layer, over all chunks: layers with equal numbers have tensors of one shape, dtype, layout
  // and requires_grad, and may share buffers. The output and its gradient have one signature.
  // Tensors kept for a weight half have the layer number as signature: no other layer shares them.
  std::vector<int64_t> input_signature = {};
  std::vector<int64_t> output_signature = {};
  Reuse reuse = Reuse::kGraphs;
};

// A graph to capture. Buffers are numbered within their role; -1 where the graph does not use one.
struct Capture {
  StepKind kind = StepKind::kForward;
  int64_t layer = 0;  // over all chunks
  int64_t chunk = 0;
  int64_t slot = 0;  // which of the chunk's sets of graphs: a microbatch, or one modulo K
  std::array<int64_t, kNumRoles> buffers = {-1, -1, -1, -1, -1};

  friend bool operator==(const Capture&, const Capture&) = default;
};

// Lifetime of one tensor in one step. Positions are those of the order list, both inclusive.
struct BufferUse {
  Role role = Role::kInput;
  int64_t buffer = 0;
  int64_t layer = 0;
  int64_t microbatch = 0;
  int64_t written = 0;
  int64_t last_read = 0;
};

struct CapturePlan {
  Order order = {};
  std::vector<Capture> captures = {};  // in the order in which to capture them
  // Replays of order position i: replay[replay_start[i]] .. replay[replay_start[i + 1]], indices
  // of captures; forward passes ascend through the layers, the others descend.
  std::vector<int64_t> replay_start = {};
  std::vector<int64_t> replay = {};
  std::vector<BufferUse> uses = {};
  // By role: the signature of each buffer.
  std::array<std::vector<int64_t>, kNumRoles> buffer_signature = {};
  std::vector<int64_t> slots_per_chunk = {};  // sets of graphs
  std::vector<int64_t> peak_per_chunk = {};   // microbatches whose input is live at once
};

// Throws std::invalid_argument if the spec does not match the order: another number of chunks, a
// chunk without layers, signatures that are not one per layer.
CapturePlan plan_capture(const Order& order, const CaptureSpec& spec);

}  // namespace megacore::graph
