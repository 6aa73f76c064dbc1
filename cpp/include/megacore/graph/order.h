// Order list of a pipeline schedule, for graph capture.
//
// Entries count chunks from 1: +c is the forward pass of chunk c, -c its backward pass, and
// -c - 0.5 the weight half of a backward pass that was split. Microbatches are implicit: the n-th
// entry of a kind and chunk is microbatch n. So the halves of a chunk may lag behind its backward
// passes by any number of microbatches.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace megacore::graph {

enum class StepKind : int8_t { kForward, kBackward, kBackwardWeight };

struct OrderStep {
  StepKind kind = StepKind::kForward;
  int64_t chunk = 0;  // from 0
  int64_t microbatch = 0;

  friend bool operator==(const OrderStep&, const OrderStep&) = default;
};

struct Order {
  int64_t num_chunks = 0;
  int64_t num_microbatches = 0;
  std::vector<bool> splits_backward = {};  // by chunk: the weight half is a step of its own
  std::vector<OrderStep> steps = {};
};

// Throws std::invalid_argument, with the list and the position marked, for an entry that names no
// chunk, a backward pass before its forward pass, a half before its backward pass or without one,
// and for chunks that differ in their number of passes.
Order parse_order(std::span<const double> entries);

// "1 1 -1 -1.5": the entries again.
std::string order_text(const Order& order);

}  // namespace megacore::graph
