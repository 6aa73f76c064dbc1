// Errors about the programs of all ranks. Private.

#pragma once

#include <string>
#include <utility>
#include <vector>

#include "megacore/pipeline/program/validate_programs.h"
#include "schedule_table_text.h"

namespace megacore::pipeline {

// The programs of all ranks, of which one at a time needs to exist.
class Programs {
 public:
  Programs(int num_ranks, ProgramOf of) : num_ranks_(num_ranks), of_(std::move(of)) {}

  int num_ranks() const { return num_ranks_; }
  // Valid until the next call.
  const Program& of(int rank) const { return of_(rank); }

 private:
  int num_ranks_;
  ProgramOf of_;
};

// The text of an error: what is wrong, and the programs as a table with the given places marked.
std::string program_report(const Programs& programs,
                           const std::vector<Mark>& marks,
                           const std::string& text);

// Throws std::invalid_argument with such a text.
[[noreturn]] void refuse(const Programs& programs,
                         const std::vector<Mark>& marks,
                         const std::string& text);

// The same about one step: "rank 1, position 4: 1B0 <text>".
[[noreturn]] void refuse_step(const Programs& programs,
                              int rank,
                              int64_t position,
                              const std::string& text);

// Throws unless every backward of one rank reads activations that were kept or made again once.
// O(steps). REQUIRES: the compute actions are those of a valid schedule.
void check_recompute(const Programs& programs, const Program& program);

}  // namespace megacore::pipeline
