"""Bytes of dry runs against those of the same layouts on real ranks of this machine.

    python benchmarks/bench_dry_run.py [--only pp] [--out benchmarks/results/dry_run.txt]

Each layout of ``bench_plan_cpu.py`` trains two steps on gloo ranks, and two steps of each rank run
without values. One tracker counts the bytes of storages in both. Beside it is the growth of the
proportional set size of the process, in which a page that n processes share counts 1/n.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import ctypes
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.attention.bias

from _common import finish, header, on_gloo_ranks, options
from bench_plan_cpu import LAYOUTS, configuration
from megatrain.config import ResolvedConfig
from megatrain.dry_run import StepTracker, dry_run, measure_steps


def changed(world_size: int, changes: Mapping[str, Any]) -> ResolvedConfig:
    """Return the configuration of a layout, whose ranks share no memory, as those of GPUs."""
    apart = {**changes, "run": {**changes.get("run", {}), "host_memory": False}}
    if changes.get("moe", {}).get("dispatcher") == "static":
        apart["moe"] = {**changes["moe"], "static_transport": "collective"}
    return configuration(world_size, apart)


def proportional_bytes() -> int:
    """Return the proportional set size of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def measure(_rank: int, world_size: int, changes: Mapping[str, Any]) -> tuple[int, int]:
    """Return the most bytes of storages of a rank, and the growth of its process."""
    ctypes.CDLL(None).malloc_trim(0)
    before, most, ended = proportional_bytes(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            most[0] = max(most[0], proportional_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        costs = measure_steps(
            changed(world_size, changes),
            world_size=world_size,
            device=torch.device("cpu"),
            tracker=StepTracker("cpu"),
        )
    finally:
        ended.set()
        thread.join()
    return costs.most_bytes, most[0] - before


def main() -> None:
    """Measure and print the table."""
    parser = options(__doc__)
    parser.add_argument("--only", default="", help="layouts with this text in their name")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    columns = ("layout", "rank", "dry MiB", "real MiB", "difference", "process MiB")
    lines, worst = ["{:24}{:>5}{:>10}{:>10}{:>12}{:>13}".format(*columns)], 0.0
    for name, (world_size, changes) in LAYOUTS.items():
        if args.only not in name:
            continue
        real = on_gloo_ranks(world_size, measure, world_size, changes, timeout_s=300)
        for rank in sorted({0, world_size - 1}):
            config = changed(world_size, changes)
            costs = dry_run(config, world_size=world_size, rank=rank).costs
            assert costs is not None
            difference = costs.most_bytes / real[rank][0] - 1
            worst = max(worst, abs(difference))
            lines.append(
                f"{name:24}{rank:5}{costs.most_bytes / 2**20:10.1f}{real[rank][0] / 2**20:10.1f}"
                f"{difference:+12.2%}{real[rank][1] / 2**20:13.1f}"
            )
            print(lines[-1], flush=True)
    lines.append(f"\nlargest difference {worst:.2%}")
    finish([header("torch"), "\n".join(lines)], args.out)


if __name__ == "__main__":
    main()
