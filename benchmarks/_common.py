"""What the benchmarks share: facts about the machine, options, turns, and gloo ranks."""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def options(doc: str | None, **kwargs: Any) -> argparse.ArgumentParser:
    """A parser that is described by the first line of a benchmark's docstring."""
    return argparse.ArgumentParser(description=(doc or "").partition("\n")[0], **kwargs)


def processor() -> str:
    """Name of the processor, and its family: "AMD EPYC" has no number on rented machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    known = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    if "model name" not in known:
        return platform.processor() or platform.machine()
    family = f" (family {known['cpu family']})" if "cpu family" in known else ""
    return f"{known['model name']}{family}"


def facts(*packages: str) -> dict[str, Any]:
    """Return machine, load, date, versions and command, by which a reader judges the numbers."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "load": f"{os.getloadavg()[0]:.1f} (average of the last minute)",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("megacore", *packages)},
        "command": " ".join(["python", *map(_without_folders, sys.argv)]),
    }


def _without_folders(argument: str) -> str:
    """Return an absolute path from the repository, or its file name where it is elsewhere."""
    path, root = Path(argument), Path(__file__).parents[1]
    if not path.is_absolute():
        return argument
    return str(path.relative_to(root) if path.is_relative_to(root) else path.name)


def header(*packages: str) -> str:
    """The facts in two lines."""
    known = facts(*packages)
    command = known.pop("command")
    cores, load = known.pop("cores"), known.pop("load")
    versions = ", ".join(f"{name} {known[name]}" for name in ("python", "megacore", *packages))
    return f"# {known['date']}; {known['cpu']}, {cores} cores; load {load}; {versions}\n# {command}"


def row(table: str, **numbers: Any) -> None:
    """Print a row of a table as a line of JSON where gpu_check.py asks for it (MEGACORE_ROWS)."""
    if os.environ.get("MEGACORE_ROWS"):
        print("@json " + json.dumps({"event": "row", "table": table, **numbers}), flush=True)


def finish(parts: Sequence[str], out: Path | None) -> None:
    """Print parts of an output, and write it to a file if there is one; its folder is made."""
    text = "\n\n".join(parts)
    print(text)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")


def write_json(path: str | Path | None, results: Any, machine: Mapping[str, Any]) -> None:
    """Write results with the facts, if a path is given; its folder is made."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"machine": machine, "results": results}, indent=2))


def keep_memory() -> None:
    """Let the allocator keep freed memory, where it is glibc's.

    Contestants in one process would else pay for fresh pages by who freed what before them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD


def take_turns(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every round of every contender, by ``clock``.

    The contenders take turns, so that a busy moment of the machine hits all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(rounds + warmup):
        for name, run in contenders.items():
            start = clock()
            run()
            if round_number >= warmup:
                times[name].append(clock() - start)
    return times


def on_gloo_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 600.0
) -> list[Any]:
    """Run ``function(rank, *args)`` in forked gloo ranks; returns their results by rank.

    Set ``OMP_NUM_THREADS=1`` before torch is imported: forked ranks need it, and share the cores.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        ranks = [
            context.Process(
                target=_gloo_rank,
                args=(rank, world_size, f"{folder}/store", results, function, args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        by_rank = dict(results.get(timeout=timeout_s) for _ in ranks)
        for process in ranks:
            process.join()
    return [by_rank[rank] for rank in range(world_size)]


def _gloo_rank(
    rank: int, world_size: int, store: str, results: Any, function: Callable[..., Any], args: Any
) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore", FutureWarning)  # torch renames two calls
    torch.set_num_threads(1)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    results.put((rank, function(rank, *args)))
    dist.barrier()
    dist.destroy_process_group()
