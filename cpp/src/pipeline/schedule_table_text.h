// The actions of all ranks as a table for error messages: one row per rank, with marks. Private.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "megacore/pipeline/action.h"

namespace megacore::pipeline {

struct Mark {
  int rank;
  int64_t position;  // in the rank's actions; its length means "behind the last one"
};

// Rows of cells, the marked ones as >2F0<. Long rows are cut to a window around their first mark,
// rows without a mark to their beginning, and more than kMaxTableRanks rows to the marked ones.
std::string marked_table(const std::vector<std::span<const Action>>& rows,
                         const std::vector<Mark>& marks);

}  // namespace megacore::pipeline
