"""Versions and hardware of the machine of a run."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch


def collect_environment() -> dict[str, str]:
    """Describe software and hardware of this process in readable text.

    Example:
        >>> "torch" in collect_environment()
        True
    """
    found = {
        "megacore": _version("megacore"),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": _version("numpy"),
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": _memory(),
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gib = properties.total_memory / 2**30
        found[f"GPU {index}"] = f"{properties.name}, {gib:.0f} GiB"
    return {name: value for name, value in found.items() if value}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _memory() -> str:
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{num_bytes / 2**30:.1f} GiB"
