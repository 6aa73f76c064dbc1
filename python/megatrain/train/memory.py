"""Memory of this process."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

_PAGE = os.sysconf("SC_PAGE_SIZE")


def memory_bytes(device: torch.device) -> tuple[float, float, float]:
    """Return bytes allocated, reserved and most allocated; on the CPU resident, shared, peak.

    Sync:
        None.
    """
    if device.type != "cuda":
        resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
        # Not ru_maxrss, which starts with the peak of the process that started this one.
        (line,) = re.findall(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
        return int(resident) * _PAGE, int(shared) * _PAGE, int(line) * 1024
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    if not stats:  # a device that is not there
        return 0.0, 0.0, 0.0
    allocated, reserved = (stats[f"{kind}_bytes"]["all"] for kind in ("allocated", "reserved"))
    return allocated["current"], reserved["current"], allocated["peak"]
