// Output of a planner's first half, which its second half splits over source ranks.

#pragma once

#include <cstdint>
#include <vector>

namespace megacore::moe {

// `tokens` of home expert `expert` are computed on `rank`, which holds a copy of it in `slot`.
struct Clone {
  int64_t expert = 0;
  int64_t rank = 0;
  int64_t slot = 0;  // [0, num_spare_slots)
  int64_t tokens = 0;

  friend bool operator==(const Clone&, const Clone&) = default;
};

}  // namespace megacore::moe
