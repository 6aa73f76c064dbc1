// Identity of a process of this machine, distinct from a later process with the same id.
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

// Whether the process has certainly ended: it does not exist, is dead but not yet reaped by its
// parent, or its id is used by another process. Reads one small file of /proc (a few microseconds).
// REQUIRES: the same process-id namespace as the process.
bool has_ended(const ProcessIdentity& process);

}  // namespace megacore::parallel
