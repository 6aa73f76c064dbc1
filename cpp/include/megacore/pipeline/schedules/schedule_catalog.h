// All named schedules in one table, and one function that builds any of them.
//
//   build_schedule("zb_v", {.num_ranks = 4, .num_microbatches = 8});

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "megacore/pipeline/schedules/generators.h"

namespace megacore::pipeline {

struct ScheduleRequest {
  int num_ranks;
  int num_microbatches;
  std::optional<int> num_chunks = std::nullopt;         // nullopt: what the schedule has, else 1
  std::optional<int> group_size = std::nullopt;         // for those that take one
  std::optional<int> warmup_multiplier = std::nullopt;  // for those that take one
  Pairs pairs = Pairs::kNone;                           // for those that can have some
};

enum class PlacementKind : uint8_t {
  kLoop,           // stage s on rank s mod p
  kV,              // down the ranks and back up
  kBidirectional,  // two chains in opposite directions
};

struct ScheduleInfo {
  std::string_view name;
  std::string_view summary;      // one line for people
  std::string_view source;       // paper or program
  std::string_view constraints;  // on the sizes, for people; empty when all sizes work
  PlacementKind placement;
  int num_chunks;        // stages per rank, or 0 for any number of model chunks
  bool splits_backward;  // has I and W
  bool takes_group_size;
  bool takes_warmup_multiplier;
  bool takes_pairs = false;  // `pairs`; the DualPipes always have some
  Schedule (*generate)(const ScheduleRequest&);
};

// In the order in which they are best presented.
std::span<const ScheduleInfo> schedule_catalog();

// Throws std::invalid_argument with all names for an unknown one.
const ScheduleInfo& find_schedule(std::string_view name);

// Throws std::invalid_argument for an unknown name, for an option that the schedule does not take,
// and for sizes that cannot work.
Schedule build_schedule(std::string_view name, const ScheduleRequest& request);

}  // namespace megacore::pipeline
