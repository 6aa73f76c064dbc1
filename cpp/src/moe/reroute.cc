#include "megacore/moe/reroute.h"

#include <vector>

#include "megacore/base/check.h"

namespace megacore::moe {

void reroute_copies(const int64_t* expert_of,
                    int64_t numel,
                    const RerouteTable& table,
                    int64_t* physical) {
  std::vector<int64_t> next(table.first, table.first + table.num_experts);
  for (int64_t i = 0; i < numel; ++i) {
    const int64_t expert = expert_of[i];
    MC_REQUIRE(expert >= -1 && expert < table.num_experts,
               "copy ",
               i,
               " is for expert ",
               expert,
               "; there are ",
               table.num_experts,
               " (use -1 for a copy that does not exist)");
    if (expert < 0) {
      physical[i] = -1;
      continue;
    }
    const int64_t index = next[static_cast<size_t>(expert)]++;
    MC_REQUIRE(index < table.total[expert],
               "expert ",
               expert,
               " has more copies than the ",
               table.total[expert],
               " that the plan was made for");
    physical[i] = destination_of(table, expert, index);
  }
}

}  // namespace megacore::moe
