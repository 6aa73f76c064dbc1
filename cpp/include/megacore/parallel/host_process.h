// A process of this machine, precise enough to tell it from a later one with the same id.
//
//   const ProcessIdentity me = this_process();
//   has_ended(me);  // false

#pragma once

#include <cstdint>

namespace megacore::parallel {

struct ProcessIdentity {
  int32_t pid = 0;
  uint64_t start_ticks = 0;  // clock ticks between boot and the start of the process; 0: not known

  friend bool operator==(const ProcessIdentity&, const ProcessIdentity&) = default;
};

ProcessIdentity this_process();

// Whether the process is surely gone: no longer there, dead but not yet reaped by its parent, or
// its id used by another one now. Reads one small file of /proc (a few microseconds).
// REQUIRES: the same process-id namespace as the process.
bool has_ended(const ProcessIdentity& process);

}  // namespace megacore::parallel
