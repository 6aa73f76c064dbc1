"""Rings of the last collectives and messages of each rank, for the diagnosis of a hang.

A rank writes a record when it starts a call and changes its state when it waits and when it is
done. The ring is a file that survives the rank, see `megacore.calls.records`: other processes
of the same user read it while the rank runs, hangs, or after it was killed.

Recording costs a few microseconds per call. With NCCL, a call is recorded when it is enqueued: no
device is queried. Calls in a replayed CUDA graph are not recorded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import mmap
import os
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from megacore.calls.processes import Identity
from megacore.calls.records import (
    COUNTS_AT,
    DONE,
    FAILED,
    HEADER_BYTES,
    MAGIC,
    MAX_DIMS,
    MAX_STREAMS,
    NAMES_AT,
    NUM_RECORDS,
    ON_DEVICE,
    POSITION_AT,
    RECORD,
    RECORDS_AT,
    STARTED,
    STATUS_AT,
    make_private,
    note_status,
    put_text,
    ring_folder,
    ring_name,
    shortened,
    sweep,
)

_MAX_LABELS = 4096
_MAX_FACTS = 1 << 14
# The parts of a record: its numbers, and the facts that are equal in every step.
_NUMBERS = struct.Struct("<QQQ")
_FACTS = struct.Struct("<IIIBBxx6q")
_STATE_AT = 36
_PACKAGE = str(Path(__file__).parents[1])
_SPEC = importlib.util.find_spec("torch")
_TORCH = str(Path(_SPEC.origin or "").parent) if _SPEC else ""
# Files whose lines say nothing of the purpose of a call.
_CARRIERS = (
    str(Path(_PACKAGE, "parallel")),
    str(Path(_PACKAGE, "pipeline", "messages.py")),
    str(Path(contextlib.__file__)),
    _TORCH,
)


class Call:
    """One call of this rank; as a context, it starts on entry and is done on exit."""

    __slots__ = ("_at", "_kind", "_on_device", "_ring", "_serial", "_since")

    def __init__(self, ring: CallRing, serial: int, kind: str, *, on_device: bool) -> None:
        self._ring = ring
        self._serial = serial
        self._kind = kind
        self._on_device = on_device
        self._since = 0.0
        self._at = RECORDS_AT + serial % NUM_RECORDS * RECORD.size

    def move_to(self, state: int) -> None:
        """Change the state, unless a later call has overwritten the record."""
        ring = self._ring
        if ring.serials[self._serial % NUM_RECORDS] == self._serial:
            ring.memory[self._at + _STATE_AT] = state

    def wait(self) -> None:
        """Start to wait, unless the call runs on a device."""
        if not self._on_device:
            self.move_to(STARTED)

    def __enter__(self) -> None:
        """Start; the call was recorded as started."""
        self._since = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish."""
        self._ring.waits[self._kind] += time.perf_counter() - self._since
        if kind is not None:
            self.move_to(FAILED)
        elif not self._on_device:
            self.move_to(DONE)


@dataclass
class _Stream:
    """Calls that their members make in the same order."""

    index: int
    count: int = 0


class GroupCalls:
    """The calls of one group of this rank.

    Args:
        ring: The ring of this rank.
        name: Name of the group.
        ranks: Global ranks of the members.
        stream: Shared by groups that use the same process group.
    """

    def __init__(
        self, ring: CallRing, name: str, ranks: Sequence[int], stream: _Stream | None = None
    ) -> None:
        self._ring = ring
        self._name = name
        self._ranks = tuple(ranks)
        self._stream = stream or ring.add_stream(name, ranks)
        self._branches: dict[Hashable, GroupCalls] = {}
        self._windows = itertools.count()

    def renamed(self, name: str) -> GroupCalls:
        """Return the calls of another group that uses the same process group."""
        return GroupCalls(self._ring, name, self._ranks, self._stream)

    def separate(self, name: str) -> GroupCalls:
        """Return the calls of another process group with the same members."""
        return GroupCalls(self._ring, name, self._ranks)

    def messages(self, sender: int, receiver: int, key: Hashable) -> GroupCalls:
        """Return the messages from one position to another with the same key, such as a tag."""
        branch = self._branches.get((sender, receiver, key))
        if branch is None:
            ranks = (self._ranks[sender], self._ranks[receiver])
            branch = GroupCalls(self._ring, f"{self._name} {ranks[0]}->{ranks[1]} {key}", ranks)
            self._branches[sender, receiver, key] = branch
        return branch

    def part(self, window: int, part: int) -> GroupCalls:
        """Return the calls on one part of a shared window, which are ordered only per part."""
        key = ("window", window, part)
        branch = self._branches.get(key)
        if branch is None:
            name = f"{self._name} window {window}.{part}"
            branch = self._branches[key] = GroupCalls(self._ring, name, self._ranks)
        return branch

    def next_window(self) -> int:
        """Number the windows of the group, which its members make in the same order."""
        return next(self._windows)

    def begin(self, kind: str, shape: Sequence[int], dtype: object, state: int = STARTED) -> Call:
        """Record the next call of the group."""
        stream = self._stream
        stream.count += 1
        return self._ring.record(stream, stream.count, (kind, self._name, dtype), shape, state)

    def begin_reuse(self) -> Call:
        """Record a wait for the other members to finish the last call."""
        return self._ring.record(
            self._stream, self._stream.count, ("reuse", self._name, ""), (), STARTED
        )


class CallRing:
    """The ring of one rank. Create with :meth:`create`.

    Attributes:
        waits: Seconds that the host has spent in calls, by kind; the owner may clear it.
    """

    def __init__(self, path: Path, file: int, memory: mmap.mmap) -> None:
        self.path = path
        self.memory = memory
        self.serials = [0] * NUM_RECORDS
        self.waits: defaultdict[str, float] = defaultdict(float)
        self._file = file
        self._next = itertools.count(1)
        self._counts = memoryview(memory)[COUNTS_AT:RECORDS_AT].cast("Q")
        self._facts: dict[object, bytes] = {}
        self._labels: dict[object, int] = {}
        self._sites: dict[tuple[str, int], int] = {}
        self._num_streams = 0

    @staticmethod
    def create(run_dir: Path, *, rank: int, world_size: int, run: str) -> CallRing | None:
        """Create the ring of this process; ``None`` if its memory or folder cannot be used.

        Args:
            run_dir: The run's folder, by which other processes find the ring.
            rank: Global rank.
            world_size: Number of ranks.
            run: Equal on all ranks of one start of the run, different for every start.
        """
        folder = ring_folder(run_dir)
        sweep(folder.parent)
        try:
            make_private(folder)
            path = folder / ring_name(rank)
            temporary = path.with_suffix(f".{os.getpid()}")
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            file = os.open(temporary, flags, 0o600)
            try:
                # Reserved: a write to a mapping without memory behind it would end the process.
                os.posix_fallocate(file, 0, NAMES_AT)
                memory = mmap.mmap(file, NAMES_AT)
            except OSError:
                os.close(file)
                temporary.unlink()
                raise
        except OSError:
            return None
        header = asdict(Identity.mine(rank)) | {
            "world_size": world_size,
            "run": run,
            "since": time.time(),
        }
        put_text(memory, 0, MAGIC.decode() + json.dumps(header), STATUS_AT)
        temporary.rename(path)
        return CallRing(path, file, memory)

    def group(self, name: str, ranks: Sequence[int]) -> GroupCalls:
        """Return the calls of a new process group."""
        return GroupCalls(self, name, ranks)

    def add_stream(self, name: str, ranks: Sequence[int]) -> _Stream:
        """Add an ordered stream of calls. The last one is for those beyond the table."""
        index = min(self._num_streams, MAX_STREAMS - 1)
        self._num_streams += 1
        if index < MAX_STREAMS - 1:
            self._name("stream", index, [name, shortened(ranks)])
        return _Stream(index)

    def record(
        self,
        stream: _Stream,
        number: int,
        label: tuple[str, str, object],
        shape: Sequence[int],
        state: int,
    ) -> Call:
        """Write a record. Called through `GroupCalls`."""
        frame: FrameType = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_CARRIERS):
            frame = frame.f_back
        key = (stream.index, frame.f_code.co_filename, frame.f_lineno, *label, shape, state)
        facts = self._facts.get(key)
        if facts is None:
            facts = self._pack_facts(stream, frame, label, shape, state)
            if len(self._facts) >= _MAX_FACTS:
                self._facts.clear()
            self._facts[key] = facts
        serial = next(self._next)
        slot = serial % NUM_RECORDS
        self.serials[slot] = serial
        at = RECORDS_AT + slot * RECORD.size
        _NUMBERS.pack_into(self.memory, at, serial, time.time_ns(), number)
        self.memory[at + _NUMBERS.size : at + RECORD.size] = facts
        self._counts[stream.index] = number
        return Call(self, serial, label[0], on_device=state == ON_DEVICE)

    def _pack_facts(
        self,
        stream: _Stream,
        frame: FrameType,
        label: tuple[str, str, object],
        shape: Sequence[int],
        state: int,
    ) -> bytes:
        """Pack all fields of a record but its numbers; they are equal in every step."""
        site = (frame.f_code.co_filename, frame.f_lineno)
        site_id = self._sites.get(site) or self._new_site(site, frame.f_code.co_name)
        label_id = self._labels.get(label) or self._new_label(label)
        sizes = (*shape, *[0] * MAX_DIMS)[:MAX_DIMS]
        dims = min(len(shape), MAX_DIMS)
        return _FACTS.pack(stream.index, site_id, label_id, state, dims, *sizes)

    def note_position(self) -> None:
        """Write where the main thread is."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            frame = frame.f_back
        if frame is not None:
            text = (
                f"{site_text(frame.f_code.co_filename, frame.f_lineno)} in {frame.f_code.co_name}"
            )
            put_text(self.memory, POSITION_AT, text, HEADER_BYTES)

    def note_status(self, status: str) -> None:
        """Write how this rank has ended, for processes that look after its end."""
        note_status(self.path, status)

    def remove(self) -> None:
        """Delete the file; the mapping stays valid."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    def _new_site(self, key: tuple[str, int], function: str) -> int:
        self._sites[key] = len(self._sites) + 1
        self._name("site", self._sites[key], f"{site_text(*key)} in {function}")
        return self._sites[key]

    def _new_label(self, label: Any) -> int:
        if len(self._labels) >= _MAX_LABELS:
            return 0
        self._labels[label] = len(self._labels) + 1
        kind, group, dtype = label
        self._name("label", self._labels[label], [kind, group, str(dtype).removeprefix("torch.")])
        return self._labels[label]

    def _name(self, table: str, index: int, value: object) -> None:
        with contextlib.suppress(OSError):  # without memory, calls lack their names
            os.write(self._file, json.dumps([table, index, value]).encode() + b"\n")


def is_carrier(filename: str) -> bool:
    """Check if the lines of a file say nothing of the purpose of a call."""
    return filename.startswith(_CARRIERS)


def site_text(filename: str, line: int) -> str:
    """Format a source line, with a short path."""
    name = filename.removeprefix(f"{_PACKAGE}{os.sep}")
    return f"{name if name != filename else '/'.join(Path(filename).parts[-2:])}:{line}"
