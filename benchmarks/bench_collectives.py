"""Collectives among ranks of one host: shared memory against gloo, in one run.

Each collective runs three ways on the same tensors, in turns: through shared memory; by the same
function of megacore on gloo; and by torch.distributed's own call on gloo. Up to 1 MiB ten calls are
made in a row. The time of a call is that of the slowest rank; shown is the median over repetitions.

    python benchmarks/bench_collectives.py [--worlds 2,4] [--kib 4,1024,65536] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # forked ranks need it, and share the cores

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from _common import facts, on_gloo_ranks, options, write_json
from megacore.parallel import Group, ProcessGroups, Topology
from megacore.parallel.collectives import (
    all_gather,
    all_reduce_,
    barrier,
    broadcast_,
    reduce_scatter,
)
from megacore.parallel.row_exchange import RowSplits, all_to_all

WAYS = ("shared memory", "megacore on gloo", "torch on gloo")
Call = Callable[[], object]


def calls_on(group: Group, whole: torch.Tensor, own: torch.Tensor) -> dict[str, Call]:
    """Every collective on a group, as a call without arguments."""
    return {
        "all_reduce": lambda: all_reduce_(whole, group),
        "reduce_scatter": lambda: reduce_scatter(own, whole, group),
        "all_gather": lambda: all_gather(whole, own, group),
        "broadcast": lambda: broadcast_(whole, group),
        "all_to_all": lambda: all_to_all(whole, group, RowSplits()),
        "barrier": lambda: barrier(group),
    }


def calls_of_torch(whole: torch.Tensor, own: torch.Tensor) -> dict[str, Call]:
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, own),
        "broadcast": lambda: dist.broadcast(whole, src=0),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "barrier": dist.barrier,
    }


def measure_on_rank(_rank: int, world_size: int, sizes_kib: list[int]) -> list[dict[str, Any]]:
    """Seconds of every call on this rank."""
    topology = Topology(world_size=world_size)
    shared = ProcessGroups.create(topology).world
    gloo = ProcessGroups.create(topology, host_memory=False).world
    if shared.host is None:
        sys.exit(f"no shared memory here: {shared.host_note}")
    rows = []
    for kib in sizes_kib:
        whole = torch.ones(kib * 1024 // 4)
        own = torch.ones(whole.numel() // world_size)
        ways = [
            calls_on(shared, whole, own),
            calls_on(gloo, whole, own),
            calls_of_torch(whole, own),
        ]
        batch = 10 if kib <= 1024 else 1
        repeats = 7 if kib > 1024 else 30
        for name in ways[0]:
            if name == "barrier" and kib != sizes_kib[0]:
                continue
            times: list[list[float]] = [[] for _ in WAYS]
            for repeat in range(repeats + 2):
                for way, calls in enumerate(ways):
                    whole.fill_(1.0)  # sums of sums would overflow
                    barrier(shared)
                    start = time.perf_counter()
                    for _ in range(batch):
                        calls[name]()
                    seconds = (time.perf_counter() - start) / batch
                    if repeat >= 2:  # the first ones connect and touch fresh memory
                        times[way].append(seconds)
            rows.append({"collective": name, "kib": kib, "times": times})
    return rows


def measure(world_size: int, sizes_kib: list[int]) -> list[dict[str, Any]]:
    """Median over the repetitions of the slowest rank's time, per collective and size."""
    by_rank = on_gloo_ranks(world_size, measure_on_rank, world_size, sizes_kib)
    rows = []
    for same_call in zip(*by_rank, strict=True):
        row = {"ranks": world_size, **{key: same_call[0][key] for key in ("collective", "kib")}}
        for way, name in enumerate(WAYS):
            slowest = map(max, zip(*(rank["times"][way] for rank in same_call), strict=True))
            row[name] = statistics.median(slowest)
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]], known: dict[str, Any]) -> None:
    table = Table(title="float32, one thread per rank, median time of the slowest rank in ms")
    for name in ("ranks", "collective", "size", *WAYS, "megacore/shm", "torch/shm"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        times = [row[way] for way in WAYS]
        size = "" if row["collective"] == "barrier" else f"{row['kib']:,} KiB"
        table.add_row(
            str(row["ranks"]),
            row["collective"],
            size,
            *(f"{1e3 * seconds:.3f}" for seconds in times),
            *(f"{other / times[0]:.1f}x" for other in times[1:]),
        )
    console = Console(width=120, highlight=False)
    console.print(table)
    for name, value in known.items():
        console.print(f"{name}: {value}", markup=False)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--worlds", default="2,4", help="numbers of ranks")
    parser.add_argument("--kib", default="4,1024,65536", help="sizes of the whole tensor, KiB")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON too")
    args = parser.parse_args()
    sizes_kib = [int(kib) for kib in args.kib.split(",")]
    rows = [row for world in args.worlds.split(",") for row in measure(int(world), sizes_kib)]
    known = facts("torch")
    show(rows, known)
    write_json(args.json, rows, known)


if __name__ == "__main__":
    main()
