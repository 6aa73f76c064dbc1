// Arguments of a grouped matrix product on a GPU for each group, computed from the counts of rows.
//
//   groups of experts:   forward       y[rows of e]  = x[rows of e] w[e]^T       (m, N, K)
//                        input grad    dx[rows of e] = dy[rows of e] w[e]        (m, K, N)
//                        weight grad   dw[e]        (+)= dy[rows of e]^T x[rows of e]   (N, K, m)
//
// Factors of 8 bits (operand_bytes is 1) have a scale per block of kScaleBlock elements of the
// depth; see moe/fp8.h for their layout and that of their scales. They have no product of the
// second kind: with weights transposed, the input gradient is a forward product.
//
// The counts are on the device, so a kernel of one block does this work. Counts that do not fit the
// rows are truncated: no count makes a product read or write outside of its matrices.

#pragma once

#include <cstdint>

#include "megacore/base/host_device.h"

namespace megacore::moe {

enum class GroupedProduct : int32_t { kForward = 0, kInputGrad = 1, kWeightGrad = 2 };

// Maximum number of experts of one launch: the set-up kernel has their counts in shared memory.
inline constexpr int64_t kMaxGroupedExperts = 1024;

struct GroupedProblem {
  GroupedProduct product;
  int64_t num_rows;       // M, of all experts and of nobody; below 2^31
  int64_t num_experts;    // E
  int64_t out_features;   // N
  int64_t in_features;    // K
  int64_t operand_bytes;  // of an element of the factors
  int64_t result_bytes;   // of an element of the result
};

// Start addresses of the two factors and the result.
struct GroupedBases {
  uint64_t a;            // x or dy
  uint64_t b;            // w, or x in the weight gradient
  uint64_t d;            // y, dx or dw
  uint64_t a_scale = 0;  // of factors of 8 bits
  uint64_t b_scale = 0;
};

// Arrays with one entry per group, in the processing order of the product.
struct GroupedArguments {
  int32_t* shapes;    // (E, 3) rows, columns and depth of the product
  uint64_t* a;        // (E) addresses
  uint64_t* b;        // (E)
  uint64_t* d;        // (E)
  int64_t* a_stride;  // (E) elements between two rows of memory
  int64_t* b_stride;  // (E)
  int64_t* d_stride;  // (E)
  uint64_t* a_scale;  // (E) addresses, of factors of 8 bits
  uint64_t* b_scale;  // (E)
  float* beta;        // (E) factor of what lies in d already: 0 or 1
};

inline constexpr int64_t kGroupedAlignment = 256;

// Rounded up to a multiple of the alignment, so that each array starts at one.
MC_HOST_DEVICE int64_t grouped_array_bytes(int64_t num_experts, int64_t entry_bytes) {
  return (num_experts * entry_bytes + kGroupedAlignment - 1) / kGroupedAlignment *
         kGroupedAlignment;
}

// Bytes of all arrays of GroupedArguments together.
MC_HOST_DEVICE int64_t grouped_arguments_bytes(int64_t num_experts) {
  return grouped_array_bytes(num_experts, 12) + 8 * grouped_array_bytes(num_experts, 8) +
         grouped_array_bytes(num_experts, 4);
}

// Places the arrays consecutively from `memory`, which is aligned to kGroupedAlignment.
MC_HOST_DEVICE GroupedArguments grouped_arguments_at(void* memory, int64_t num_experts) {
  char* next = static_cast<char*>(memory);
  const int64_t wide = grouped_array_bytes(num_experts, 8);
  GroupedArguments arguments{};
  arguments.shapes = reinterpret_cast<int32_t*>(next);
  next += grouped_array_bytes(num_experts, 12);
  arguments.a = reinterpret_cast<uint64_t*>(next);
  arguments.b = reinterpret_cast<uint64_t*>(next + wide);
  arguments.d = reinterpret_cast<uint64_t*>(next + 2 * wide);
  arguments.a_stride = reinterpret_cast<int64_t*>(next + 3 * wide);
  arguments.b_stride = reinterpret_cast<int64_t*>(next + 4 * wide);
  arguments.d_stride = reinterpret_cast<int64_t*>(next + 5 * wide);
  arguments.a_scale = reinterpret_cast<uint64_t*>(next + 6 * wide);
  arguments.b_scale = reinterpret_cast<uint64_t*>(next + 7 * wide);
  arguments.beta = reinterpret_cast<float*>(next + 8 * wide);
  return arguments;
}

// A count clamped to [0, num_rows], so that sums of counts cannot overflow.
MC_HOST_DEVICE int64_t usable_count(int64_t count, int64_t num_rows) {
  return count < 0 ? 0 : (count > num_rows ? num_rows : count);
}

// The count of an expert; without counts there is one expert.
MC_HOST_DEVICE int64_t usable_count_of(const int64_t* m_splits, int64_t expert, int64_t num_rows) {
  return m_splits == nullptr ? num_rows : usable_count(m_splits[expert], num_rows);
}

// Rows before those of the first expert; 0 if the pointer is null.
MC_HOST_DEVICE int64_t rows_before(const int64_t* first_row, int64_t num_rows) {
  return first_row == nullptr ? 0 : usable_count(*first_row, num_rows);
}

struct GroupRows {
  int64_t start;
  int64_t count;
};

// The rows of an expert, from its usable count and the sum of the counts up to and including it.
MC_HOST_DEVICE GroupRows rows_of_group(int64_t end, int64_t count, int64_t num_rows) {
  const int64_t start = end - count;
  const int64_t first = start < num_rows ? start : num_rows;
  return {first, (end < num_rows ? end : num_rows) - first};
}

// Elements with one scale, along the depth of a product of 8-bit factors.
inline constexpr int64_t kScaleBlock = 128;

MC_HOST_DEVICE int64_t scale_blocks(int64_t count) {
  return (count + kScaleBlock - 1) / kScaleBlock;
}

// The first block of rows of an expert, whose rows begin at `start`: no two experts share a block,
// and the blocks of an expert follow from nothing but the rows before it. Some are not used.
MC_HOST_DEVICE int64_t first_block_of(int64_t start, int64_t expert) {
  return start / kScaleBlock + expert;
}

// How many blocks there may be.
MC_HOST_DEVICE int64_t row_blocks(int64_t num_rows, int64_t num_experts) {
  return num_rows / kScaleBlock + num_experts;
}

// Whether group `one` precedes group `other`: the weight gradient processes the longest groups
// first, because their tiles take the longest; the others keep the order of the experts.
MC_HOST_DEVICE bool goes_first(GroupedProduct product,
                               int64_t one,
                               int64_t rows_of_one,
                               int64_t other,
                               int64_t rows_of_other) {
  if (product == GroupedProduct::kWeightGrad && rows_of_one != rows_of_other) {
    return rows_of_one > rows_of_other;
  }
  return one < other;
}

// Writes the entries of one expert at place `place`. A group without rows gets a result without
// rows, also in the weight gradient: not every kernel supports a depth of zero.
MC_HOST_DEVICE void write_group(const GroupedArguments& arguments,
                                int64_t place,
                                const GroupedProblem& problem,
                                const GroupedBases& bases,
                                int64_t expert,
                                const GroupRows& rows,
                                bool accumulates) {
  const int64_t n = problem.out_features, k = problem.in_features;
  const int64_t weight = expert * n * k;
  int64_t shape[3];
  int64_t a = 0, b = 0, d = 0, a_stride = 0, b_stride = 0, d_stride = 0;
  if (problem.product == GroupedProduct::kForward) {
    shape[0] = rows.count, shape[1] = n, shape[2] = k;
    a = rows.start * k, b = weight, d = rows.start * n;
    a_stride = k, b_stride = k, d_stride = n;
  } else if (problem.product == GroupedProduct::kInputGrad) {
    shape[0] = rows.count, shape[1] = k, shape[2] = n;
    a = rows.start * n, b = weight, d = rows.start * k;
    a_stride = n, b_stride = k, d_stride = k;
  } else {
    shape[0] = rows.count > 0 ? n : 0, shape[1] = k, shape[2] = rows.count;
    a = rows.start * n, b = rows.start * k, d = weight;
    a_stride = n, b_stride = k, d_stride = k;
  }
  if (problem.operand_bytes == 1) {
    int64_t a_scale = rows.start * scale_blocks(k);
    int64_t b_scale = expert * scale_blocks(n) * scale_blocks(k);
    if (problem.product == GroupedProduct::kWeightGrad) {
      const int64_t first = first_block_of(rows.start, expert);
      const int64_t depth = scale_blocks(rows.count) * kScaleBlock;
      shape[2] = a_stride = b_stride = depth;
      a = first * kScaleBlock * n, b = first * kScaleBlock * k;
      a_scale = first * n, b_scale = first * k;
    }
    arguments.a_scale[place] = bases.a_scale + static_cast<uint64_t>(a_scale) * sizeof(float);
    arguments.b_scale[place] = bases.b_scale + static_cast<uint64_t>(b_scale) * sizeof(float);
  }
  for (int i = 0; i < 3; ++i) {
    arguments.shapes[3 * place + i] = static_cast<int32_t>(shape[i]);
  }
  arguments.a[place] = bases.a + static_cast<uint64_t>(a * problem.operand_bytes);
  arguments.b[place] = bases.b + static_cast<uint64_t>(b * problem.operand_bytes);
  arguments.d[place] = bases.d + static_cast<uint64_t>(d * problem.result_bytes);
  arguments.a_stride[place] = a_stride;
  arguments.b_stride[place] = b_stride;
  arguments.d_stride[place] = d_stride;
  arguments.beta[place] = accumulates ? 1.0F : 0.0F;
}

}  // namespace megacore::moe
