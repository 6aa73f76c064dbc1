// Assignment of token copies to the home of their expert or to one of its clones, by a plan.
//
// The plan has the number of copies of a source rank for each destination; this code selects the
// copies. They are spread evenly, so no run of neighbouring tokens overloads one rank: of m copies,
// n go to a clone such that floor(i n / m) of the first i copies do. Several clones are processed
// in sequence, by (rank, slot), each from the copies left by earlier ones. Every clone gets exactly
// its number.
//
// With a plan every rank has L + k places: its L home experts, then its k spare slots.
//
// The arithmetic is shared with a CUDA kernel: a team of threads (team_memory.h) builds the table
// and then looks up one copy per thread; on the CPU the team is one thread.

#pragma once

#include <cstdint>

#include "megacore/base/host_device.h"
#include "megacore/moe/team_memory.h"

namespace megacore::moe {

// Destinations of one source rank's copies: a row of a plan.
struct SourceRow {
  PlanShape shape = {};
  const int64_t* total = nullptr;        // (expert,) copies of the source rank
  const int64_t* first = nullptr;        // (expert,) how many of them come before those at hand:
                                         // those of the members of the source rank before this one
  const int64_t* slot_expert = nullptr;  // (rank, slot) cloned expert, -1 where unused
  const int64_t* tokens = nullptr;       // (rank, slot) copies that go to the clone
};

// A row sorted by expert: parts [first_part[e], first_part[e + 1]) are those of expert e.
struct RerouteParts {
  int64_t* first_part = nullptr;  // (experts + 1)
  int64_t* slot = nullptr;        // (parts) where the clone lies, of the slots of all ranks
  int64_t* tokens = nullptr;      // (parts) copies that go there, at least 1

  MC_HOST_DEVICE static int64_t words(const PlanShape& shape) {
    return shape.num_experts + 1 + 2 * shape.num_slots();
  }
  // REQUIRES: `memory` has words(shape) entries.
  MC_HOST_DEVICE static RerouteParts at(int64_t* memory, const PlanShape& shape) {
    int64_t* parts = memory + shape.num_experts + 1;
    return {memory, parts, parts + shape.num_slots()};
  }
};

// Destination of copy `index` of `expert`, of the `total` copies of the source rank for it.
// REQUIRES: 0 <= index < total < 2^31, the parts' tokens sum to at most the total.
MC_HOST_DEVICE int64_t destination_of(const RerouteParts& parts,
                                      const PlanShape& shape,
                                      int64_t expert,
                                      int64_t index,
                                      int64_t total) {
  for (int64_t i = parts.first_part[expert]; i < parts.first_part[expert + 1]; ++i) {
    const int64_t tokens = parts.tokens[i];
    const int64_t before = index * tokens / total;
    if ((index + 1) * tokens / total > before) {
      return shape.place_of_slot(parts.slot[i]);
    }
    index -= before;
    total -= tokens;
  }
  return shape.place_of_expert(expert);
}

// Whether copies of the row go to this slot.
MC_HOST_DEVICE bool is_part(const SourceRow& row, int64_t slot) {
  return row.slot_expert[slot] >= 0 && row.tokens[slot] > 0;
}

// Sorts the row by expert, stably. The caller synchronizes the team afterwards. O(slots (slots +
// experts)) work, shared by the threads.
template <typename Team>
MC_TEAM_CODE void make_parts(const Team& team, const SourceRow& row, const RerouteParts& parts) {
  const int64_t num_slots = row.shape.num_slots();
  for (int64_t e = team.thread(); e <= row.shape.num_experts; e += team.threads()) {
    int64_t before = 0;
    for (int64_t i = 0; i < num_slots; ++i) {
      before += is_part(row, i) && row.slot_expert[i] < e ? 1 : 0;
    }
    parts.first_part[e] = before;
  }
  for (int64_t j = team.thread(); j < num_slots; j += team.threads()) {
    if (is_part(row, j)) {
      int64_t before = 0;
      for (int64_t i = 0; i < num_slots; ++i) {
        const int64_t order = row.slot_expert[i] - row.slot_expert[j];
        before += is_part(row, i) && (order < 0 || (order == 0 && i < j)) ? 1 : 0;
      }
      parts.slot[before] = j;
      parts.tokens[before] = row.tokens[j];
    }
  }
}

// The place of one copy, -1 if there is no copy; `rank_in_expert` is the index of the copy among
// those of its expert. Invalid plan entries give no copy, since a kernel cannot report errors.
MC_HOST_DEVICE int64_t place_of_copy(const SourceRow& row,
                                     const RerouteParts& parts,
                                     int64_t expert,
                                     int64_t rank_in_expert) {
  if (expert < 0 || expert >= row.shape.num_experts) {
    return -1;
  }
  const int64_t index = row.first[expert] + rank_in_expert;
  if (index < 0 || index >= row.total[expert]) {
    return -1;
  }
  return destination_of(parts, row.shape, expert, index, row.total[expert]);
}

// The place of each copy, in order; -1 stays -1. Throws std::invalid_argument for an expert that
// does not exist or has more copies than the row, and for a row that moves more copies of an expert
// than there are.
void reroute_copies(const int64_t* expert_of,
                    int64_t numel,
                    const SourceRow& row,
                    int64_t* place_of);

}  // namespace megacore::moe
