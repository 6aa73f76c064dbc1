// Epoch flags: synchronization of reads and writes between members of a group.
//
// A flag has the number of the last epoch (round) that its writer has finished. Members are at most
// a few rounds apart, so the numbers may wrap around and are never reset. Shared by the processes
// of a host (host_window.h) and by CUDA kernels.

#pragma once

#include <cstdint>

#include "megacore/base/host_device.h"

namespace megacore::parallel {

// Whether a flag shows that `epoch` is finished.
MC_HOST_DEVICE bool has_reached(uint32_t flag, uint32_t epoch) {
  return static_cast<int32_t>(flag - epoch) >= 0;
}

// Record of a kernel after a timeout, read by the host; a kernel cannot raise an error.
enum class PeerFault : int64_t {
  kNone = 0,
  kStillReads = 1,    // a member has not finished with what was in the memory before
  kNoCounts = 2,      // its counts did not come
  kNoRows = 3,        // its rows did not come
  kOtherCapacity = 4  // it keeps another number of rows
};

struct PeerFailure {
  PeerFault fault = PeerFault::kNone;
  int64_t member = 0;  // below 2^16
  uint32_t epoch = 0;
};

// One word, not 0.
MC_HOST_DEVICE int64_t packed_failure(const PeerFailure& failure) {
  return (static_cast<int64_t>(failure.fault) << 48) | (failure.member << 32) |
         static_cast<int64_t>(failure.epoch);
}

MC_HOST_DEVICE PeerFailure unpacked_failure(int64_t word) {
  return {static_cast<PeerFault>(word >> 48), (word >> 32) & 0xffff,
          static_cast<uint32_t>(word & 0xffffffff)};
}

}  // namespace megacore::parallel
