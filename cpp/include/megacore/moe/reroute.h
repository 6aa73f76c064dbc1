// Sends copies of tokens to the home of their expert or to one of its clones, as a plan says.
//
// The plan says how many copies of a source rank go where; here it is decided which. They are
// spread evenly, so no run of neighbouring tokens floods one rank: of m copies, n go to a clone
// such that after i copies floor(i n / m) have gone. Several clones are served one after the other,
// each from what the ones before have left. Every clone gets exactly its number.

#pragma once

#include <cstdint>

namespace megacore::moe {

// What one source rank does with its copies. Arrays of num_experts unless noted.
struct RerouteTable {
  int64_t num_experts;
  const int64_t* home;         // where the copies go that no clone takes
  const int64_t* total;        // copies of the source rank
  const int64_t* first;        // how many of them come before those at hand
  const int64_t* first_part;   // (num_experts + 1): whose parts are which
  const int64_t* destination;  // (parts): where the clone is
  const int64_t* tokens;       // (parts): copies that go to the clone
};

// Where copy `index` of expert `expert` goes.
// REQUIRES: 0 <= index < total[expert] < 2^31, the parts' tokens sum to at most the total.
constexpr int64_t destination_of(const RerouteTable& table, int64_t expert, int64_t index) {
  int64_t total = table.total[expert];
  for (int64_t i = table.first_part[expert]; i < table.first_part[expert + 1]; ++i) {
    const int64_t tokens = table.tokens[i];
    const int64_t before = index * tokens / total;
    if ((index + 1) * tokens / total > before) {
      return table.destination[i];
    }
    index -= before;
    total -= tokens;
  }
  return table.home[expert];
}

// The destination of each copy, in order; -1 stays -1. Throws std::invalid_argument for an expert
// that does not exist or has more copies than the table says.
void reroute_copies(const int64_t* expert_of,
                    int64_t numel,
                    const RerouteTable& table,
                    int64_t* physical);

}  // namespace megacore::moe
