"""Files of the last calls of each rank: layout, folders and reading.

A file has a header with the rank's process, its end and its position, a table of counts by stream,
a ring of records of fixed size, and behind them a line of JSON for each name that records refer to.
It is in memory of the machine. After a failure it is copied into ``<run.dir>/calls``, where the
ranks of other machines find it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import mmap
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from megacore.calls.processes import Identity, is_dead
from megacore.errors import printable

# A call that is enqueued on a device is not seen to end.
ENQUEUED, STARTED, DONE, FAILED, ON_DEVICE = range(5)
ENDED = "its process has ended"
ANY = -1  # a size that may differ from member to member

NUM_RECORDS = 1024
MAX_STREAMS = 4096
MAX_DIMS = 6
MAGIC = b"megacore calls 1"
RECORD = struct.Struct("<QQQIIIBBxx6q")
HEADER_BYTES = 4096
STATUS_AT = 2048
POSITION_AT = 3072
COUNTS_AT = HEADER_BYTES
RECORDS_AT = COUNTS_AT + 8 * MAX_STREAMS
NAMES_AT = RECORDS_AT + NUM_RECORDS * RECORD.size
_KEPT_S = 86_400.0
_MAX_MEMBERS = 1 << 24


# Calls that their members make in the same order: name and ranks.
Stream = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRecord:
    """One call of a rank.

    Attributes:
        serial: Number among all calls of the rank.
        time_s: When it was made, seconds since the epoch.
        stream: Calls that their members make in the same order: name and ranks.
        number: Number in the stream, from 1.
        kind: The function, such as ``"all_reduce_"``.
        group: Name of the group.
        dtype: Of the tensor; may be empty.
        shape: Of the tensor, `ANY` where it may differ between members.
        site: Source line of the caller.
        state: ``ENQUEUED``, ``STARTED``, ``DONE``, ``FAILED`` or ``ON_DEVICE``.
    """

    serial: int
    time_s: float
    stream: Stream
    number: int
    kind: str
    group: str
    dtype: str
    shape: tuple[int, ...]
    site: str
    state: int

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks that take part."""
        return self.stream[1]

    @property
    def what(self) -> tuple[str, str, str, tuple[int, ...]]:
        """Kind, group, dtype and shape, which must be equal on all members."""
        return self.kind, self.group, self.dtype, self.shape

    @property
    def identity(self) -> tuple[Any, str, str]:
        """Stream, kind and source line: equal for the same call of different steps."""
        return self.stream, self.kind, self.site

    def __str__(self) -> str:
        sizes = ", ".join("*" if size == ANY else str(size) for size in self.shape)
        tensor = f" [{sizes}] {self.dtype}" if self.dtype else ""
        return f"{self.kind}{tensor} over {self.group}, number {self.number} ({self.site})"


@dataclass(frozen=True, kw_only=True)
class RankCalls:
    """Contents of the ring of one rank.

    Attributes:
        identity: The process.
        world_size: Number of ranks of the run.
        run: Identifies the start of the run.
        since: When the ring was created, seconds since the epoch.
        status: How the rank has ended; empty if it did not write or was not seen to end.
        position: Where its main thread was a moment ago; may be empty.
        counts: Calls so far by stream.
        records: The last calls, oldest first. Those of a copy are read from its file at each use,
            because those of all ranks would fill the memory.
        is_copy: Whether it is a copy made after a failure.
    """

    identity: Identity
    world_size: int
    run: str
    since: float
    status: str = ""
    position: str = ""
    counts: dict[Stream, int] = field(default_factory=dict)
    records: Sequence[CallRecord] = ()
    is_copy: bool = False


# Whether a record of a stream, with a number and in a state, is wanted.
Wanted = Callable[[Stream, int, int], bool]


class _CopiedRecords(Sequence[CallRecord]):
    """Records of a file that nobody writes any more; none if it has been removed."""

    def __init__(self, path: Path, known: dict[Any, Any]) -> None:
        self._path, self._known = path, known

    def __len__(self) -> int:
        return len(self._read())

    @overload
    def __getitem__(self, index: int) -> CallRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[CallRecord]: ...
    def __getitem__(self, index: int | slice) -> CallRecord | list[CallRecord]:
        return self._read()[index]

    def __iter__(self) -> Iterator[CallRecord]:
        return iter(self._read())

    def _read(self, wanted: Wanted | None = None) -> list[CallRecord]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, struct.error):
            data = _data_of(self._path)
            return _records_of(data, _names_of(data), self._known, wanted)
        return []

    def last_serial(self) -> int:
        """Return the highest serial of the records; 0 if there are none."""
        with contextlib.suppress(OSError, ValueError):
            data = _data_of(self._path)
            return int(max(row[0] for row in RECORD.iter_unpack(data[RECORDS_AT:NAMES_AT])))
        return 0

    def select(self, wanted: Wanted) -> list[CallRecord]:
        """Return some of the records; the others are not decoded, which takes the time."""
        return self._read(wanted)


def select(records: Sequence[CallRecord], wanted: Wanted) -> list[CallRecord]:
    """Return the records of a rank whose stream, number and state are wanted."""
    if isinstance(records, _CopiedRecords):
        return records.select(wanted)
    return [record for record in records if wanted(record.stream, record.number, record.state)]


def last_serial(records: Sequence[CallRecord]) -> int:
    """Return the serial of the last call of a rank, without decoding it; 0 if there is none."""
    if isinstance(records, _CopiedRecords):
        return records.last_serial()
    return records[-1].serial if records else 0


def read_rings(run_dir: Path) -> list[RankCalls]:
    """Read the rings of the newest start of a run: those of this machine, and copies of all."""
    found: dict[tuple[str, int], RankCalls] = {}
    known: dict[Any, Any] = {}
    for folder, is_copy in ((saved_folder(run_dir), True), (ring_folder(run_dir), False)):
        for path in sorted(folder.glob("rank_*.ring")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, struct.error):
                calls = _read(path, is_copy=is_copy, known=known)
                key = calls.run, calls.identity.rank
                if key not in found:
                    found[key] = calls
    if not found:
        return []
    run = max(found.values(), key=lambda calls: calls.since).run
    return sorted(
        (calls for calls in found.values() if calls.run == run),
        key=lambda calls: calls.identity.rank,
    )


def save_rings(run_dir: Path) -> None:
    """Copy the rings of this machine into the run's folder, except those already copied."""
    target = saved_folder(run_dir)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(ring_folder(run_dir).glob("rank_*.ring")):
            calls = _read(path, is_copy=False)
            if not calls.status and is_dead(calls.identity):
                note_status(path, ENDED)
            copy = target / path.name
            if copy.exists() and _read(copy, is_copy=True).run == calls.run:
                continue
            temporary = target / f"{path.name}.{os.getpid()}"
            shutil.copyfile(path, temporary)
            temporary.rename(copy)


def remove_rings(run_dir: Path, *, of_running: bool = True) -> None:
    """Delete the rings of this machine, or only those of ended ranks."""
    _remove(ring_folder(run_dir), of_running=of_running)


def _remove(folder: Path, *, of_running: bool) -> None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        for path in folder.glob("rank_*"):
            if of_running or is_dead(_read(path, is_copy=False).identity):
                path.unlink(missing_ok=True)
        folder.rmdir()


def note_status(path: Path, status: str) -> None:
    """Write into a ring how its rank has ended."""
    with (
        contextlib.suppress(OSError, ValueError),
        path.open("r+b") as file,
        mmap.mmap(file.fileno(), NAMES_AT) as memory,
    ):
        put_text(memory, STATUS_AT, status, POSITION_AT)


def ring_folder(run_dir: Path) -> Path:
    """Return the folder of the rings of a run on this machine."""
    memory = Path("/dev/shm")
    root = memory if memory.is_dir() and os.access(memory, os.W_OK) else tempfile.gettempdir()
    name = hashlib.sha256(os.fsencode(os.path.realpath(run_dir))).hexdigest()[:16]
    return Path(root) / f"megacore-{os.geteuid()}-{name}"


def ring_name(rank: int) -> str:
    """Return the file name of the ring of a rank.

    Example:
        >>> ring_name(3)
        'rank_00003.ring'
    """
    return f"rank_{rank:05d}.ring"


def saved_folder(run_dir: Path) -> Path:
    """Return the folder of the rings that were copied after a failure."""
    return run_dir / "calls"


def sweep(root: Path) -> None:
    """Remove the rings of runs whose ranks and launchers were all killed, after a day."""
    for folder in root.glob(f"megacore-{os.geteuid()}-*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.lstat().st_mtime >= _KEPT_S and not folder.is_symlink():
                _remove(folder, of_running=False)


def make_private(folder: Path) -> None:
    """Create a folder that no other user can write to, or check an existing one.

    Raises:
        PermissionError: If it belongs to another user.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    state = folder.lstat()
    if folder.is_symlink() or state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise PermissionError(f"{folder} belongs to another user")


def _read(path: Path, *, is_copy: bool, known: dict[Any, Any] | None = None) -> RankCalls:
    """Read a ring; what another one has too, by ``known``, is one object."""
    known = {} if known is None else known
    data = _data_of(path)
    header = json.loads(_text(data, len(MAGIC), STATUS_AT))
    own = {name: int(header[name]) for name in ("rank", "pid", "start")}
    host, space = str(header["host"]), str(header["space"])
    names = _names_of(data)
    counts = struct.unpack_from(f"<{MAX_STREAMS}Q", data, COUNTS_AT)
    return RankCalls(
        identity=Identity(host=host, space=space, **own),
        world_size=int(header["world_size"]),
        run=str(header["run"]),
        since=float(header["since"]),
        status=printable(_text(data, STATUS_AT, POSITION_AT)),
        position=printable(_text(data, POSITION_AT, HEADER_BYTES)),
        counts={stream: counts[index] for index, stream in _streams_of(names, known).items()},
        records=_CopiedRecords(path, known) if is_copy else _records_of(data, names, known),
        is_copy=is_copy,
    )


def _data_of(path: Path) -> bytes:
    data = path.read_bytes()
    if not data.startswith(MAGIC) or len(data) < NAMES_AT:
        raise ValueError(f"{path} has no calls")
    return data


# What the records of a ring refer to, by table and index.
_Names = dict[tuple[str, int], Any]


def _names_of(data: bytes) -> _Names:
    names: _Names = {}
    for line in data[NAMES_AT:].splitlines():
        with contextlib.suppress(ValueError, TypeError):
            table, index, value = json.loads(line)
            names[table, index] = value
    return names


def _streams_of(names: _Names, known: dict[Any, Any]) -> dict[int, Stream]:
    streams = {}
    for (table, index), value in names.items():
        if table == "stream":
            key = "stream", str(value[0]), *value[1]
            streams[index] = known.setdefault(key, (key[1], _lengthened(value[1])))
    return streams


def _records_of(
    data: bytes, names: _Names, known: dict[Any, Any], wanted: Wanted | None = None
) -> list[CallRecord]:
    streams = _streams_of(names, known)
    # Texts and shapes are one object in all rings too: of many ranks they fill the memory.
    labels, sites = {}, {}
    for (table, index), value in names.items():
        if table == "label":
            kind, group, dtype = map(str, value)
            label = kind, group, dtype
            labels[index] = known.setdefault(("label", label), label)
        elif table == "site":
            text = printable(str(value))
            sites[index] = known.setdefault(("site", text), text)
    records = (
        _record_of(fields, streams, labels, sites, known)
        for fields in RECORD.iter_unpack(data[RECORDS_AT:NAMES_AT])
        if fields[0] > 0
        and (stream := streams.get(fields[3])) is not None
        and (wanted is None or wanted(stream, fields[2], fields[6]))
    )
    return sorted(records, key=lambda record: record.serial)


def _record_of(
    fields: tuple[int, ...],
    streams: dict[int, Stream],
    labels: dict[int, tuple[str, str, str]],
    sites: dict[int, str],
    known: dict[Any, Any],
) -> CallRecord:
    serial, time_ns, number, stream, site, label, state, dims, *sizes = fields
    kind, group, dtype = labels.get(label, ("unknown", "?", ""))
    shape = tuple(sizes[:dims])
    return CallRecord(
        serial=serial,
        time_s=time_ns / 1e9,
        stream=streams[stream],
        number=number,
        kind=kind,
        group=group,
        dtype=dtype,
        shape=known.setdefault(("shape", shape), shape),
        site=sites.get(site, "unknown line"),
        state=state,
    )


def put_text(memory: mmap.mmap, start: int, text: str, end: int) -> None:
    """Write text and a zero byte, cut to fit before ``end``."""
    data = text.encode()[: end - start - 1]
    memory[start : start + len(data) + 1] = data + b"\0"


def _text(data: bytes, start: int, end: int) -> str:
    return data[start:end].partition(b"\0")[0].decode(errors="replace")


def shortened(ranks: Sequence[int]) -> list[int]:
    """Write ranks as ``[first, stride, -count]`` where that is possible."""
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 3 and all(b - a == stride for a, b in itertools.pairwise(ranks)):
        return [ranks[0], stride, -len(ranks)]
    return list(ranks)


def _lengthened(ranks: Iterable[Any]) -> tuple[int, ...]:
    listed = tuple(map(int, ranks))
    if listed and listed[-1] < 0:
        first, stride, count = listed
        if count < -_MAX_MEMBERS:
            raise ValueError(f"a group of {-count} ranks")
        return tuple(range(first, first - stride * count, stride))
    return listed
