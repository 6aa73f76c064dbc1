"""One trace of the profiles of all ranks, on the clock of rank 0.

Source: the Trace Event Format of Chrome, as torch's profiler writes it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megacore.errors import MegacoreError

# Key of the profile of a rank with its rank and the offset of its clock from that of rank 0.
CLOCK_KEY = "megacore"
_PROCESSES = 1000  # process numbers per rank
_FLOWS = 1 << 40  # numbers of arrows per rank


def merge_profiles(paths: Sequence[Path], out: Path) -> tuple[int, int]:
    """Write the events of several profiles into one file, compressed if it ends in ``.gz``.

    One profile at a time is in memory.

    Args:
        paths: Profiles of ranks, written with ``debug.profile_steps``.
        out: File to write.

    Returns:
        Numbers of ranks and of events.

    Raises:
        MegacoreError: If a profile is damaged or of another program.
    """
    partial = out.with_name(out.name + ".partial")
    base, num_events = None, 0
    opened = gzip.open if out.suffix == ".gz" else open
    with opened(partial, "wt", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for path in paths:
            trace = _read(path)
            base = trace["baseTimeNanoseconds"] if base is None else base
            offset_us = trace[CLOCK_KEY]["offset_us"]
            shift_us = (trace["baseTimeNanoseconds"] - base) / 1e3 - offset_us
            events = _events_of(trace["traceEvents"], trace[CLOCK_KEY]["rank"], shift_us)
            for event in events:
                file.write((",\n" if num_events else "\n") + json.dumps(event))
                num_events += 1
        file.write("\n]}\n")
    partial.replace(out)
    return len(paths), num_events


def _events_of(
    events: Sequence[dict[str, Any]], rank: int, shift_us: float
) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank with numbers that no other rank has."""
    used = [event["pid"] for event in events if event["ph"] == "X" and type(event["pid"]) is int]
    numbers = {pid: rank * _PROCESSES + index for index, pid in enumerate(dict.fromkeys(used))}
    labels = {e["pid"]: e["args"]["labels"] for e in events if e["name"] == "process_labels"}
    for pid, number in numbers.items():
        name = {"name": f"rank {rank}, {labels.get(pid, 'CPU')}"}
        yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": name}
        order = {"sort_index": number}
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": order}
    for event in events:
        # The profiler's own spans have names in place of process numbers.
        if event["pid"] not in numbers or event["name"].startswith("process_"):
            continue
        moved = {**event, "pid": numbers[event["pid"]], "ts": event["ts"] + shift_us}
        if isinstance(event.get("id"), int):
            moved["id"] = rank * _FLOWS + event["id"]
        yield moved


def _read(path: Path) -> dict[str, Any]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            trace: dict[str, Any] = json.load(file)
        clock = trace[CLOCK_KEY]
        if not {"rank", "offset_us"} <= clock.keys() or "baseTimeNanoseconds" not in trace:
            raise KeyError(CLOCK_KEY)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MegacoreError(
            f"{path} must be the profile of a rank, written with debug.profile_steps; it is "
            f"damaged or of another program ({type(error).__name__})"
        ) from error
    return trace
