// Flags that count: how members of a group tell each other that memory may be read or written.
//
// A flag holds the number of the last round (epoch) that its writer has finished. Nobody is ever
// more than a few rounds ahead, so the numbers may wrap around and are never reset. Shared by the
// processes of a host (host_window.h) and by CUDA kernels.

#pragma once

#include <cstdint>

#include "megacore/base/host_device.h"

namespace megacore::parallel {

// Whether a flag says that `epoch` is finished.
MC_HOST_DEVICE bool has_reached(uint32_t flag, uint32_t epoch) {
  return static_cast<int32_t>(flag - epoch) >= 0;
}

}  // namespace megacore::parallel
