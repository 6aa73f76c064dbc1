"""Dumps of torch's flight recorder, read as calls that `megatrain.hang.diagnosis` compares.

With ``TORCH_FR_BUFFER_SIZE`` set, torch records the collectives of each process group and, unlike
the rings of this package, when those of NCCL have ended. Each rank's record is written to
``<run.dir>/calls/flight_RANK`` when the run fails: by torch when a collective times out, or by the
rank itself. Point-to-point messages are left out, because torch does not number them by pair.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megacore.calls.processes import Identity
from megacore.calls.records import (
    DONE,
    ENQUEUED,
    STARTED,
    CallRecord,
    RankCalls,
    saved_folder,
)
from megacore.calls.ring import is_carrier, site_text
from megacore.errors import printable
from megatrain.daemon import within
from megatrain.files import PlainUnpickler

SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
FILE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DUMP_S = 5.0
# The sizes of their inputs may differ between members.
_UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "coalesced")
_UNKNOWN_COUNT = 1 << 62

Group = tuple[str, str]  # torch's name of a process group, and its description


def is_on(environ: Mapping[str, str]) -> bool:
    """Check if the user has switched the flight recorder on."""
    return any(environ.get(name, "0") != "0" for name in SIZE_VARIABLES)


def dump_prefix(run_dir: Path) -> Path:
    """Return the path of the dumps of a run without the ranks at their ends."""
    return saved_folder(run_dir) / "flight_"


def direct_dumps(run_dir: Path, environ: MutableMapping[str, str]) -> None:
    """Let torch write dumps into the run's folder, unless the user has chosen another place."""
    if not is_on(environ) or any(name in environ for name in FILE_VARIABLES):
        return
    with contextlib.suppress(OSError):
        saved_folder(run_dir).mkdir(parents=True, exist_ok=True)
        environ[FILE_VARIABLES[0]] = str(dump_prefix(run_dir))


def save_dump(run_dir: Path, rank: int, backend: str, environ: Mapping[str, str]) -> None:
    """Write the flight record of this rank, unless it is off or was already written."""
    places = [environ[name] for name in FILE_VARIABLES if name in environ]
    path = Path(f"{places[0] if places else dump_prefix(run_dir)}{rank}")
    name = "_dump_nccl_trace" if backend == "nccl" else "_dump_fr_trace"
    dump = getattr(torch._C._distributed_c10d, name, None)
    if not is_on(environ) or dump is None or path.exists():
        return
    # A process group that is stuck may hold the lock of the recorder.
    with contextlib.suppress(OSError, RuntimeError, TimeoutError):
        data = within(_DUMP_S, dump)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(data)
        temporary.rename(path)


def read_dumps(prefix: Path, rings: Sequence[RankCalls]) -> list[RankCalls]:
    """Read the dumps of all ranks; a file that cannot be read is left out.

    Args:
        prefix: Path of the files without the ranks at their ends.
        rings: Rings of the ranks, for their processes.
    """
    dumps: dict[int, _Dump] = {}
    for path in sorted(prefix.parent.glob(f"{prefix.name}*")):
        rank = path.name[len(prefix.name) :]
        if rank.isdecimal():
            with contextlib.suppress(Exception):  # pickle reports damage by errors of any class
                dumps[int(rank)] = _Dump.read(path)
    world_size = max([len(dumps), *(calls.world_size for calls in rings)])
    members = _members(dumps, world_size)
    by_rank = {calls.identity.rank: calls for calls in rings}
    return [
        dump.to_calls(by_rank.get(rank) or _unknown(rank, world_size), members)
        for rank, dump in sorted(dumps.items())
    ]


def _entry(entry: Mapping[str, Any], group: Group) -> CallRecord:
    """Convert one collective of a dump to a call, whose members are not known yet."""
    kind = _text(entry["profiling_name"]).rpartition(":")[2].lstrip("_")
    is_even = not any(word in kind for word in _UNEVEN) or kind.startswith("all_gather")
    sizes = entry["input_sizes"] if is_even else []
    state = STARTED if entry["state"] == "started" else ENQUEUED
    name = group[1] or group[0]
    return CallRecord(
        serial=int(entry["record_id"]),
        time_s=int(entry["time_created_ns"]) / 1e9,
        stream=(name, ()),
        number=int(entry["collective_seq_id"]),
        kind=kind,
        group=name,
        dtype=_text((entry["input_dtypes"] or [""])[0]).lower(),
        shape=tuple(map(int, sizes[0])) if sizes else (),
        site=_site(entry.get("frames") or []),
        state=DONE if entry["state"] == "completed" or entry["retired"] else state,
    )


@dataclass(frozen=True, kw_only=True)
class _Dump:
    """Contents of one file.

    Attributes:
        entries: Collectives by group, oldest first.
        ranks: Members of groups, where torch has written them.
        is_cut: Whether the oldest collectives have been overwritten.
    """

    entries: dict[Group, list[CallRecord]]
    ranks: dict[str, tuple[int, ...]]
    is_cut: bool

    @staticmethod
    def read(path: Path) -> _Dump:
        data = PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        entries: dict[Group, dict[int, CallRecord]] = defaultdict(dict)
        first = 0
        for number, item in enumerate(data["entries"]):
            first = int(item["record_id"]) if number == 0 else first
            if not item["is_p2p"]:
                name, description = map(_text, item["process_group"])
                entry = _entry(item, (name, description))
                # The last one of a number represents the parts of a coalesced collective.
                entries[name, description][entry.number] = entry
        ranks = {
            str(name): tuple(map(int, json.loads(_text(config["ranks"]))))
            for name, config in data["pg_config"].items()
        }
        ordered = {
            group: [found[number] for number in sorted(found)] for group, found in entries.items()
        }
        return _Dump(entries=ordered, ranks=ranks, is_cut=first > 0)

    def to_calls(self, calls: RankCalls, members: Mapping[Group, tuple[int, ...]]) -> RankCalls:
        """Convert to calls of the rank, with its process and end from its ring."""
        records: list[CallRecord] = []
        counts = {}
        for group, ranks in members.items():
            stream = (group[1] or group[0], ranks)
            found = self.entries.get(group, [])
            last_done = max((each.number for each in found if each.state == DONE), default=0)
            is_first = True
            for each in found:
                state = each.state
                if each.number < last_done:
                    state = DONE
                elif is_first and state != DONE:  # a communicator runs one after the other
                    state = STARTED
                is_first = is_first and state == DONE
                records.append(replace(each, stream=stream, state=state))
            missed = _UNKNOWN_COUNT if self.is_cut else 0
            counts[stream] = found[-1].number if found else missed
        records.sort(key=lambda record: record.serial)
        return replace(calls, counts=counts, records=records)


def _members(dumps: Mapping[int, _Dump], world_size: int) -> dict[Group, tuple[int, ...]]:
    """Return the members of each group: as written by torch, or else the ranks that used it."""
    users: dict[Group, list[int]] = defaultdict(list)
    written: dict[str, tuple[int, ...]] = {}
    for rank, dump in dumps.items():
        written |= {name: ranks for name, ranks in dump.ranks.items() if ranks}
        for group in dump.entries:
            users[group].append(rank)
    everyone = tuple(range(world_size))
    return {
        group: written.get(group[0])
        or (everyone if group[1] == "default_pg" else tuple(sorted(ranks)))
        for group, ranks in users.items()
    }


def _unknown(rank: int, world_size: int) -> RankCalls:
    identity = Identity(rank=rank, pid=0, host="unknown", space="", start=0)
    return RankCalls(identity=identity, world_size=world_size, run="", since=0.0, is_copy=True)


def _site(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost line outside of torch and of the wrappers of collectives."""
    for frame in frames:
        filename = _text(frame["filename"])
        if not is_carrier(filename) and not re.match(r"<.*>$", filename):
            return f"{site_text(filename, int(frame['line']))} in {_text(frame['name'])}"
    return "unknown line"


def _text(value: Any) -> str:
    # Containers of a damaged file may be nested without end.
    shown = str(value) if isinstance(value, str | int) else type(value).__name__
    return printable(shown).replace("\n", " ")
