#include "megacore/moe/grouped_arguments.h"

#include <vector>

#include "megacore/base/check.h"

namespace megacore::moe {

void fill_grouped_arguments(const GroupedProblem& problem,
                            const int64_t* m_splits,
                            const int64_t* first_row,
                            const uint8_t* accumulate_mask,
                            bool accumulate,
                            const GroupedBases& bases,
                            const GroupedArguments& arguments) {
  const int64_t num_experts = problem.num_experts;
  MC_REQUIRE(num_experts >= 1 && num_experts <= kMaxGroupedExperts,
             "num_experts is {}; one launch takes 1 to {}", num_experts, kMaxGroupedExperts);
  MC_REQUIRE(m_splits != nullptr || num_experts == 1, "{} experts need m_splits", num_experts);
  std::vector<GroupRows> rows;
  int64_t end = rows_before(first_row, problem.num_rows);
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const int64_t count = usable_count_of(m_splits, expert, problem.num_rows);
    end += count;
    rows.push_back(rows_of_group(end, count, problem.num_rows));
  }
  const auto count_of = [&](int64_t expert) { return rows[static_cast<size_t>(expert)].count; };
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    int64_t place = 0;
    for (int64_t other = 0; other < num_experts; ++other) {
      place += goes_first(problem.product, other, count_of(other), expert, count_of(expert));
    }
    const bool accumulates = accumulate_mask == nullptr ? accumulate : accumulate_mask[expert] != 0;
    write_group(arguments, place, problem, bases, expert, rows[static_cast<size_t>(expert)],
                accumulates);
  }
}

}  // namespace megacore::moe
