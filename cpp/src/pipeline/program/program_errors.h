// Errors about the programs of all ranks, and the checks that make them. Private.

#pragma once

#include <span>
#include <string>
#include <vector>

#include "megacore/pipeline/program/validate_programs.h"
#include "schedule_table_text.h"

namespace megacore::pipeline {

using Programs = std::span<const Program>;

// The text of an error: what is wrong, and the programs as a table with the given places marked.
std::string program_report(Programs programs, const std::vector<Mark>& marks, std::string text);

// Throws std::invalid_argument with such a text.
[[noreturn]] void refuse(Programs programs, const std::vector<Mark>& marks, std::string text);

// The same about one step: "rank 1, position 4: 1B0 <text>".
[[noreturn]] void refuse_step(Programs programs, int rank, int64_t position, std::string text);

// Throws unless every rank reaches its end with one queue per channel if receives are ahead, and
// with one queue per rank if they are in order. O(steps).
// REQUIRES: every send has one receive in the programs, and every receive one send.
void check_deadlock(Programs programs);

// Throws unless every backward reads activations that were kept or made again once. O(steps).
// REQUIRES: the compute actions are a valid schedule.
void check_recompute(Programs programs);

}  // namespace megacore::pipeline
