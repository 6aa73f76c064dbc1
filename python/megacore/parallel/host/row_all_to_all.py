"""All-to-all of rows through shared memory of one host.

Every member copies its rows into a segment of its own and publishes where each receiver finds its
part; receivers copy their parts out when they need them. So an exchange is under way from its
start, without a thread, and all of its data are copied twice.

A member has as many segments as it has exchanges that others still read, each as large as needed:
the number of rows may differ from call to call and from member to member. The copies are not
operations of torch, because a transfer is not part of the computation that a graph captures.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megacore._core import HostWindow

Memory: TypeAlias = npt.NDArray[np.uint8]

NUM_EXCHANGES = 64  # that may be under way at a time
_NUM_FACTS = 4  # of a segment: serial number, process, file, bytes
_SMALLEST_BYTES = 1 << 16
_MAX_CACHED = 4  # opened segments per member
_CLOSING_S = 5.0  # for the last rows to be read; longer waits would hide this member's own error


@dataclass(eq=False)
class _Segment:
    """Memory of this member that others can open.

    Attributes:
        serial: Unique number; file numbers are used again.
        file: File descriptor of the memory.
        memory: The bytes, ``(capacity,)``.
        exchange: Last exchange that used it.
    """

    serial: int
    file: int
    memory: Memory
    exchange: int = -1

    def __del__(self) -> None:
        """Close the file; mappings, here and in other processes, keep the memory."""
        os.close(self.file)


@dataclass(frozen=True)
class StartedExchange:
    """An exchange under way.

    Attributes:
        number: Of all exchanges of the group, from 0.
        rows: The rows sent, unchanged until the end: this member's own part is read from them.
        sent: Rows for each member.
    """

    number: int
    rows: Tensor
    sent: Sequence[int]


class HostExchange:
    """The exchanges of one group, for ``exchange.all_to_all_async``. One thread at a time.

    Args:
        window: A window with ``NUM_EXCHANGES`` parts and :meth:`window_bytes` bytes.
        position: This member.
        size: Number of members.
    """

    def __init__(self, window: HostWindow, *, position: int, size: int) -> None:
        self._window = window
        self._position = position
        self._size = size
        self._tables = [_table(window, member, size) for member in range(size)]
        self._segments: list[_Segment] = []
        self._opened: OrderedDict[tuple[int, int], Memory] = OrderedDict()
        self._num_started = 0
        self._num_segments = 0

    def __del__(self) -> None:
        """Keep the segments for a while until the other members have read them."""
        end = time.monotonic() + _CLOSING_S
        with contextlib.suppress(RuntimeError):
            for segment in self._segments:
                self._is_taken(segment.exchange, limit_s=max(0.0, end - time.monotonic()))

    @staticmethod
    def window_bytes(size: int) -> int:
        """Return the bytes per member of the window for a group of ``size`` members."""
        return NUM_EXCHANGES * (_NUM_FACTS + size) * 8

    def start(self, rows: Tensor, sent: Sequence[int]) -> StartedExchange:
        """Publish rows.

        Args:
            rows: Contiguous; first the rows for position 0.
            sent: Rows for each member.

        Raises:
            OSError: If there is no memory for the rows.

        Sync:
            Waits for members that are ``NUM_EXCHANGES`` exchanges behind.
        """
        exchange = self._num_started
        part = exchange % NUM_EXCHANGES
        self._num_started += 1
        self._window.wait_until_taken(part)
        row_bytes = _row_bytes(rows)
        others = rows.nbytes - sent[self._position] * row_bytes
        facts = [0] * _NUM_FACTS
        if others > 0:
            segment = self._free_segment(rows.nbytes)
            segment.exchange = exchange
            ctypes.memmove(segment.memory.ctypes.data, rows.data_ptr(), rows.nbytes)
            facts = [segment.serial, os.getpid(), segment.file, segment.memory.size]
        counts = [count * row_bytes for count in sent]
        self._tables[self._position][part] = facts + counts
        self._window.offer(part)
        return StartedExchange(exchange, rows, sent)

    def is_ready(self, started: StartedExchange) -> bool:
        """Return whether :meth:`finish` would not wait."""
        return self._window.is_offered(started.number % NUM_EXCHANGES)

    def finish(self, started: StartedExchange, output: Tensor, got: Sequence[int]) -> None:
        """Copy the rows from all members into ``output``, those of position 0 first.

        Args:
            started: Result of :meth:`start`.
            output: Contiguous, rows of the same size.
            got: Rows from each member.

        Raises:
            RuntimeError: If a member was lost or does not come before the timeout, or sends
                another number of rows.

        Sync:
            Waits until all members have started the exchange.
        """
        part = started.number % NUM_EXCHANGES
        self._window.wait_until_offered(part)
        row_bytes = _row_bytes(output)
        target = output.data_ptr()
        for member, count in enumerate(got):
            num_bytes = count * row_bytes
            serial, pid, file, capacity, *counts = self._tables[member][part].tolist()
            if counts[self._position] != num_bytes:
                self._window.take(part)
                raise RuntimeError(
                    f"all-to-all: position {self._position} expects {num_bytes} bytes from "
                    f"position {member}, which sends {counts[self._position]}"
                )
            if num_bytes > 0:
                before = sum(counts[: self._position])
                source = (
                    started.rows.data_ptr()
                    if member == self._position
                    else self._open(member, serial, pid, file, capacity).ctypes.data
                )
                ctypes.memmove(target, source + before, num_bytes)
            target += num_bytes
        self._window.take(part)

    def _free_segment(self, num_bytes: int) -> _Segment:
        """Return a segment that no member reads any more, with at least ``num_bytes``."""
        free = [segment for segment in self._segments if self._is_taken(segment.exchange)]
        fitting = [segment for segment in free if segment.memory.size >= num_bytes]
        if fitting:
            return min(fitting, key=lambda segment: segment.memory.size)
        for segment in free[:1]:
            self._segments.remove(segment)
        self._num_segments += 1
        capacity = max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
        file = os.memfd_create("megacore", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(file, 0, capacity)
            memory = _mapped(file, capacity)
        except OSError:
            os.close(file)
            raise
        self._segments.append(_Segment(serial=self._num_segments, file=file, memory=memory))
        return self._segments[-1]

    def _is_taken(self, exchange: int, *, limit_s: float = 0.0) -> bool:
        """Return whether all others have read the rows of an exchange, or do so in ``limit_s``."""
        if exchange <= self._num_started - 1 - NUM_EXCHANGES:
            return True
        part = exchange % NUM_EXCHANGES
        return all(
            self._window.wait_for_take_by(member, part=part, limit_s=limit_s)
            for member in range(self._size)
            if member != self._position
        )

    def _open(self, member: int, serial: int, pid: int, file: int, capacity: int) -> Memory:
        key = (member, serial)
        if key not in self._opened:
            try:
                theirs = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise RuntimeError(
                    f"all-to-all: cannot open the memory of position {member} (pid {pid}): "
                    f"{error.strerror}; has that process ended?"
                ) from error
            try:
                self._opened[key] = _mapped(theirs, capacity)
            finally:
                os.close(theirs)
            if len(self._opened) > _MAX_CACHED * self._size:
                self._opened.popitem(last=False)
        self._opened.move_to_end(key)
        return self._opened[key]


def _mapped(file: int, num_bytes: int) -> Memory:
    return np.frombuffer(mmap.mmap(file, num_bytes), dtype=np.uint8)


def _table(window: HostWindow, member: int, size: int) -> npt.NDArray[np.int64]:
    memory = memoryview(memory_at(window.data_of(member), window.bytes, window))
    return np.frombuffer(memory, dtype=np.int64).reshape(NUM_EXCHANGES, _NUM_FACTS + size)


def memory_at(address: int, num_bytes: int, owner: object) -> ctypes.Array[ctypes.c_uint8]:
    """Return native memory as a buffer, which keeps its owner alive."""
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return memory


def _row_bytes(rows: Tensor) -> int:
    return math.prod(rows.shape[1:]) * rows.dtype.itemsize
