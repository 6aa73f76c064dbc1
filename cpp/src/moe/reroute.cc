#include "megacore/moe/reroute.h"

#include <vector>

#include "megacore/base/check.h"

namespace megacore::moe {
namespace {

void require_row(const SourceRow& row) {
  const PlanShape& shape = row.shape;
  MC_REQUIRE(shape.num_ranks >= 1 && shape.num_experts % shape.num_ranks == 0 &&
                 shape.num_spare_slots >= 0,
             "{} experts do not divide over {} ranks", shape.num_experts, shape.num_ranks);
  std::vector<int64_t> moved(static_cast<size_t>(shape.num_experts), 0);
  for (int64_t slot = 0; slot < shape.num_slots(); ++slot) {
    if (is_part(row, slot)) {
      const int64_t expert = row.slot_expert[slot];
      MC_REQUIRE(expert < shape.num_experts, "slot {} holds expert {}; there are {}", slot, expert,
                 shape.num_experts);
      moved[static_cast<size_t>(expert)] += row.tokens[slot];
    }
  }
  for (int64_t expert = 0; expert < shape.num_experts; ++expert) {
    const int64_t tokens = moved[static_cast<size_t>(expert)];
    MC_REQUIRE(tokens <= row.total[expert],
               "the plan moves {} copies of this source rank for expert {}, which has {}; give the "
               "tokens that the plan was made for",
               tokens, expert, row.total[expert]);
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
               "copy {} is for expert {}; there are {} (use -1 for a copy that does not exist)", i,
               expert, num_experts);
    if (expert < 0) {
      place_of[i] = -1;
      continue;
    }
    const int64_t rank_in_expert = seen[static_cast<size_t>(expert)]++;
    MC_REQUIRE(row.first[expert] + rank_in_expert < row.total[expert],
               "expert {} has more copies than the {} that the plan was made for", expert,
               row.total[expert]);
    place_of[i] = place_of_copy(row, parts, expert, rank_in_expert);
  }
}

}  // namespace megacore::moe
