// In which order a rank of the interleaved schedule walks its (microbatch, chunk) pairs.
//
// Microbatches are cut into groups of `group_size`, the last group may be shorter; inside a group
// all microbatches of chunk 0 come first, then those of chunk 1, and so on.
//
//   schedule_table({.num_microbatches = 5, .num_chunks = 2, .group_size = 3})
//     microbatch 0 1 2 0 1 2 3 4 3 4
//     chunk      0 0 0 1 1 1 0 0 1 1
//
// The k-th forward is entry k; the k-th backward is entry k with chunk num_chunks - 1 - chunk.
// Source: Narayanan et al., arXiv:2104.04473, section 2.2.2.

#pragma once

#include <cstdint>
#include <vector>

namespace megacore::pipeline {

struct ScheduleTableShape {
  int num_microbatches;  // >= 1
  int num_chunks;        // model chunks per rank, >= 1
  int group_size;        // microbatches per group, >= 1; may exceed num_microbatches
};

struct TableEntry {
  int32_t microbatch;
  int32_t chunk;

  friend bool operator==(const TableEntry&, const TableEntry&) = default;
};

std::vector<TableEntry> schedule_table(const ScheduleTableShape& shape);

}  // namespace megacore::pipeline
