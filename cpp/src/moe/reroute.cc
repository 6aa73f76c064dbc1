#include "megacore/moe/reroute.h"

#include <vector>

#include "megacore/base/check.h"

namespace megacore::moe {
namespace {

void require_row(const SourceRow& row) {
  const PlanShape& shape = row.shape;
  MC_REQUIRE(shape.num_ranks >= 1 && shape.num_experts % shape.num_ranks == 0 &&
                 shape.num_spare_slots >= 0,
             shape.num_experts,
             " experts do not divide over ",
             shape.num_ranks,
             " ranks");
  std::vector<int64_t> moved(static_cast<size_t>(shape.num_experts), 0);
  for (int64_t slot = 0; slot < shape.num_slots(); ++slot) {
    if (is_part(row, slot)) {
      const int64_t expert = row.slot_expert[slot];
      MC_REQUIRE(expert < shape.num_experts,
                 "slot ",
                 slot,
                 " holds expert ",
                 expert,
                 "; there are ",
                 shape.num_experts);
      moved[static_cast<size_t>(expert)] += row.tokens[slot];
    }
  }
  for (int64_t expert = 0; expert < shape.num_experts; ++expert) {
    const int64_t tokens = moved[static_cast<size_t>(expert)];
    MC_REQUIRE(tokens <= row.total[expert],
               "the plan moves ",
               tokens,
               " copies of this source rank for expert ",
               expert,
               ", which has ",
               row.total[expert],
               "; give the tokens that the plan was made for");
  }
}

}  // namespace

void reroute_copies(const int64_t* expert_of,
                    int64_t numel,
                    const SourceRow& row,
                    int64_t* place_of) {
  require_row(row);
  const int64_t num_experts = row.shape.num_experts;
  std::vector<int64_t> memory(static_cast<size_t>(RerouteParts::words(row.shape)));
  const RerouteParts parts = RerouteParts::at(memory.data(), row.shape);
  make_parts(SoloTeam{}, row, parts);
  std::vector<int64_t> seen(static_cast<size_t>(num_experts), 0);
  for (int64_t i = 0; i < numel; ++i) {
    const int64_t expert = expert_of[i];
    MC_REQUIRE(expert >= -1 && expert < num_experts,
               "copy ",
               i,
               " is for expert ",
               expert,
               "; there are ",
               num_experts,
               " (use -1 for a copy that does not exist)");
    if (expert < 0) {
      place_of[i] = -1;
      continue;
    }
    const int64_t rank_in_expert = seen[static_cast<size_t>(expert)]++;
    MC_REQUIRE(row.first[expert] + rank_in_expert < row.total[expert],
               "expert ",
               expert,
               " has more copies than the ",
               row.total[expert],
               " that the plan was made for");
    place_of[i] = place_of_copy(row, parts, expert, rank_in_expert);
  }
}

}  // namespace megacore::moe
