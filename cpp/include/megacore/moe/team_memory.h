// Teams of threads and their planning memory: see team_planner.h.
//
// A team is one block of threads on a GPU, or a single thread on the CPU. It consists of warps; a
// warp of the CPU has one lane. Team code is written from the perspective of one thread:
//
//   warp.lane(), warp.lanes()         this thread's place in its warp
//   warp.max(x), warp.min(x), warp.sum(x)   over the lanes; every lane gets the result
//   warp.before(flag, total)          flags of lower lanes, and of all
//   warp.sum_before(x, total)         sum over the lower lanes, and over all
//   warp.sync()                       writes of the lanes are seen by the lanes
//   team.thread(), team.threads(), team.warp(), team.warps(), team.sync()    as above

#pragma once

#include <cstdint>

#include "megacore/base/host_device.h"
#include "megacore/moe/plan_spec.h"
#include "megacore/moe/planner_math.h"

// Marks team code: device code for the CUDA compiler, host code otherwise.
#if defined(__CUDACC__)
#define MC_TEAM_CODE __device__ __forceinline__
#else
#define MC_TEAM_CODE inline
#endif

namespace megacore::moe {

// The CPU's team, and its only warp.
struct SoloTeam {
  MC_TEAM_CODE int lane() const { return 0; }
  MC_TEAM_CODE int lanes() const { return 1; }
  MC_TEAM_CODE uint64_t max(uint64_t value) const { return value; }
  MC_TEAM_CODE uint64_t min(uint64_t value) const { return value; }
  MC_TEAM_CODE int64_t sum(int64_t value) const { return value; }
  MC_TEAM_CODE int64_t before(bool flag, int64_t& total) const {
    total = flag ? 1 : 0;
    return 0;
  }
  MC_TEAM_CODE int64_t sum_before(int64_t value, int64_t& total) const {
    total = value;
    return 0;
  }
  MC_TEAM_CODE int thread() const { return 0; }
  MC_TEAM_CODE int threads() const { return 1; }
  MC_TEAM_CODE int warp() const { return 0; }
  MC_TEAM_CODE int warps() const { return 1; }
  MC_TEAM_CODE void sync() const {}
};

// The clones of a plan by (rank, slot).
struct SlotTable {
  int64_t* expert = nullptr;  // -1 where unused
  int64_t* tokens = nullptr;
};

// Working memory of one greedy run.
struct RunMemory {
  int64_t* load = nullptr;        // (rank,)
  int64_t* slots_left = nullptr;  // (rank,)
  int64_t* largest = nullptr;     // (rank,) the most of `remaining`; Rule::kBestFill only
  int64_t* sends = nullptr;       // (rank,) clones made of its experts
  uint64_t* donor = nullptr;      // (rank,) most_key of its surplus; 0 if it cannot give
  uint64_t* receiver = nullptr;   // (rank,) most_key of its slack; 0 if it cannot receive
  int64_t* remaining = nullptr;   // (expert,) tokens still on the home expert
  SlotTable clones = {};
  Score* score = nullptr;
};

// Working memory of the split of one expert's tokens; reuses the memory of a run.
struct SplitMemory {
  int64_t* left = nullptr;           // (rank,) tokens a source has
  int64_t* left_over = nullptr;      // (rank,) after its proportional shares
  int64_t* slot = nullptr;           // (clone,) where the clone lies, rank * slots + slot
  int64_t* own = nullptr;            // (clone,) tokens of the clone's own rank
  int64_t* missing = nullptr;        // (clone,) tokens it still needs
  int64_t* missing_after = nullptr;  // (clone,) after the proportional shares
};

// What every thread needs to know of a plan, written by one.
struct PlanFacts {
  int64_t is_valid = 1;        // no count is negative or too large
  int64_t total = 0;           // tokens
  int64_t highest_load = 0;    // of a rank
  int64_t largest_expert = 0;  // its tokens
  int64_t num_spilling = 0;    // experts that spill; echo planner only
};

// A planner's memory, cut from one array of 64-bit words.
class PlanMemory {
 public:
  // REQUIRES: `memory` has words(shape, num_runs) entries, num_runs >= 1.
  MC_HOST_DEVICE PlanMemory(int64_t* memory, const PlanShape& shape, int64_t num_runs)
      : words_(memory), shape_(shape), num_runs_(num_runs) {}

  MC_HOST_DEVICE static int64_t words_of_run(const PlanShape& shape) {
    const int64_t run = 6 * shape.num_ranks + shape.num_experts + 2 * shape.num_slots() + kScore;
    return run;  // a split needs 6 * num_ranks
  }
  MC_HOST_DEVICE static int64_t words(const PlanShape& shape, int64_t num_runs) {
    return shape.num_experts + shape.num_ranks + 2 * shape.num_slots() + kFacts +
           larger(num_runs * words_of_run(shape), 3 * shape.num_experts + shape.num_ranks);
  }

  MC_HOST_DEVICE int64_t num_runs() const { return num_runs_; }
  MC_HOST_DEVICE int64_t* experts() const { return words_; }  // (expert,) tokens from all ranks
  MC_HOST_DEVICE int64_t* ranks() const { return words_ + shape_.num_experts; }  // (rank,)
  MC_HOST_DEVICE SlotTable chosen() const {
    int64_t* table = ranks() + shape_.num_ranks;
    return {table, table + shape_.num_slots()};
  }
  MC_HOST_DEVICE PlanFacts& facts() const {
    return *reinterpret_cast<PlanFacts*>(ranks() + shape_.num_ranks + 2 * shape_.num_slots());
  }
  // (expert,), (expert,), (expert,), (rank,): the echo planner's, in place of runs.
  MC_HOST_DEVICE int64_t* spilled() const { return scratch(); }
  MC_HOST_DEVICE int64_t* spilling() const { return spilled() + shape_.num_experts; }
  MC_HOST_DEVICE int64_t* spilling_start() const { return spilling() + shape_.num_experts; }
  MC_HOST_DEVICE int64_t* room_start() const { return spilling_start() + shape_.num_experts; }

  MC_HOST_DEVICE RunMemory run(int64_t index) const {
    const int64_t ranks = shape_.num_ranks;
    int64_t* at = scratch() + index * words_of_run(shape_);
    int64_t* table = at + 6 * ranks + shape_.num_experts;
    return {.load = at,
            .slots_left = at + ranks,
            .largest = at + 2 * ranks,
            .sends = at + 3 * ranks,
            .donor = reinterpret_cast<uint64_t*>(at + 4 * ranks),
            .receiver = reinterpret_cast<uint64_t*>(at + 5 * ranks),
            .remaining = at + 6 * ranks,
            .clones = {table, table + shape_.num_slots()},
            .score = reinterpret_cast<Score*>(table + 2 * shape_.num_slots())};
  }
  MC_HOST_DEVICE SplitMemory split(int64_t index) const {
    const int64_t ranks = shape_.num_ranks;
    int64_t* at = scratch() + index * words_of_run(shape_);
    return {at, at + ranks, at + 2 * ranks, at + 3 * ranks, at + 4 * ranks, at + 5 * ranks};
  }

 private:
  static constexpr int64_t kScore = sizeof(Score) / sizeof(int64_t);
  static constexpr int64_t kFacts = sizeof(PlanFacts) / sizeof(int64_t);

  MC_HOST_DEVICE int64_t* scratch() const {
    return ranks() + shape_.num_ranks + 2 * shape_.num_slots() + kFacts;
  }

  int64_t* words_;
  PlanShape shape_;
  int64_t num_runs_;
};

}  // namespace megacore::moe
