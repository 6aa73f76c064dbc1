#include "megacore/pipeline/schedules/schedule_table.h"

#include <algorithm>

#include "megacore/base/check.h"

namespace megacore::pipeline {

std::vector<TableEntry> schedule_table(const ScheduleTableShape& shape) {
  MC_REQUIRE(shape.num_microbatches >= 1, "num_microbatches must be at least 1, got {}",
             shape.num_microbatches);
  MC_REQUIRE(shape.num_chunks >= 1, "num_chunks must be at least 1, got {}", shape.num_chunks);
  MC_REQUIRE(shape.group_size >= 1, "group_size must be at least 1, got {}", shape.group_size);
  std::vector<TableEntry> table;
  table.reserve(static_cast<size_t>(shape.num_microbatches) *
                static_cast<size_t>(shape.num_chunks));
  for (int begin = 0; begin < shape.num_microbatches;) {
    const int size = std::min(shape.group_size, shape.num_microbatches - begin);
    for (int chunk = 0; chunk < shape.num_chunks; ++chunk) {
      for (int i = 0; i < size; ++i) table.push_back({begin + i, chunk});
    }
    begin += size;
  }
  return table;
}

}  // namespace megacore::pipeline
