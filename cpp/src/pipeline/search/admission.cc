#include "search/admission.h"

#include <algorithm>

namespace megacore::pipeline {

bool leaves_room(const Instance& instance,
                 const std::vector<int>& counts,
                 int64_t held,
                 int stage) {
  const auto done = [&](int32_t other, Part part) {
    return counts[static_cast<size_t>(other) * 3 + static_cast<size_t>(part)];
  };
  const Part release = instance.split ? Part::kWeight : Part::kBackward;
  const auto s = static_cast<size_t>(stage);
  const int rank = instance.placement.rank_of(stage);
  const int microbatch = done(stage, Part::kForward);
  const int64_t limit = instance.limit[static_cast<size_t>(rank)];
  if (held + instance.size[s] > limit) return false;
  const auto stages = instance.placement.stages_of(rank);
  for (const int32_t later : stages) {
    const int oldest = done(later, Part::kForward);
    if (later <= stage || oldest >= microbatch) continue;
    // Room for microbatch `oldest`, when all before it are gone: what it and later ones hold now,
    // this F, and its own forwards to come.
    int64_t room = instance.size[s];
    for (const int32_t other : stages) {
      const int forwards = done(other, Part::kForward);
      const int64_t size = instance.size[static_cast<size_t>(other)];
      room += size * std::max(forwards - std::max(done(other, release), oldest), 0);
      if (forwards <= oldest) room += size;
    }
    if (room > limit) return false;
  }
  return true;
}

}  // namespace megacore::pipeline
