"""Tensors in shared memory of one host: collectives without staging memory.

``host_memory`` copies tensors chunk by chunk through shared slots, in lockstep with other members.
A ``WindowTensor`` is itself shared. A part of it is *offered* when its data are final; each rank
later reads the data it needs from the others, at a time of its choice. So a collective can be
started during a computation, without additional memory or a second copy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal

import torch
from torch.autograd.graph import increment_version
from torch.profiler import record_function

from megacore._core import HostWindow
from megacore.calls.records import ENQUEUED
from megacore.calls.ring import GroupCalls
from megacore.parallel.async_collectives import PendingCollective
from megacore.parallel.host.row_all_to_all import memory_at
from megacore.parallel.host.shared_memory import HOST_DTYPES, HOST_REDUCTIONS
from megacore.parallel.process_groups import Group


class WindowTensor:
    """A flat CPU tensor, initially zero, in memory that all members of a group can read.

    Collectives run in place on numbered parts of it. Every member starts and completes those of one
    part in the same order; parts are independent. A part must not be written between the start of a
    collective and :meth:`wait_until_free`.

    Args:
        window: The native window.
        numel: Elements.
        dtype: Their dtype.
        size: Number of members of the group.
        calls: Records the calls of the group.

    Attributes:
        data: The tensor, ``(numel,)``, which owns a reference to the memory.
    """

    def __init__(
        self,
        window: HostWindow,
        *,
        numel: int,
        dtype: torch.dtype,
        size: int,
        calls: GroupCalls | None = None,
    ) -> None:
        self._window = window
        self._calls = calls
        self._number = 0 if calls is None else calls.next_window()
        self._size = size
        self._dtype = HOST_DTYPES[dtype]
        self._element_bytes = dtype.itemsize
        memory = memory_at(window.data, window.bytes, window)
        self.data = torch.frombuffer(memory, dtype=dtype, count=numel)

    @staticmethod
    def zeros(
        numel: int, *, dtype: torch.dtype, group: Group, num_parts: int
    ) -> WindowTensor | None:
        """Allocate a window tensor on every member of ``group``. Collective.

        Returns:
            The tensor; ``None``, on every member, if the group does not share memory or an
            allocation fails.
        """
        if group.host is None or numel == 0:
            return None
        window = group.host.make_window(numel * dtype.itemsize, num_parts=num_parts)
        return (
            None
            if window is None
            else WindowTensor(window, numel=numel, dtype=dtype, size=group.size, calls=group.calls)
        )

    def start_reduce_scatter(
        self, part: int, start: int, end: int, *, op: Literal["sum", "avg"], name: str
    ) -> PendingCollective:
        """Start to reduce elements ``[start, end)``, those of ``part``, over the group.

        Afterwards the slice of these elements at this member's position is reduced, bitwise equal
        to :func:`megacore.parallel.collectives.reduce_scatter`. Profiles show the work under
        ``name``.
        """

        def reduce() -> None:
            self._window.reduce_scatter(
                part=part,
                offset=start * self._element_bytes,
                numel=(end - start) // self._size,
                dtype=self._dtype,
                op=HOST_REDUCTIONS[op],
            )

        return self._start(part, reduce, name, "reduce_scatter", end - start)

    def start_all_gather(self, part: int, start: int, end: int, *, name: str) -> PendingCollective:
        """Start the all-gather of elements ``[start, end)`` of ``part``, one slice per member."""

        def gather() -> None:
            self._window.all_gather(
                part=part,
                offset=start * self._element_bytes,
                numel=(end - start) // self._size,
                dtype=self._dtype,
            )

        return self._start(part, gather, name, "all_gather", end - start)

    def wait_until_free(self, part: int) -> None:
        """Wait until no other member needs the part, so that it may be written.

        Sync:
            Waits until all members have completed the last started collective of the part.
        """
        calls = self._calls_on(part)
        with calls.begin_reuse() if calls is not None else nullcontext():
            self._window.wait_until_taken(part)

    def _calls_on(self, part: int) -> GroupCalls | None:
        return None if self._calls is None else self._calls.part(self._number, part)

    def _start(
        self, part: int, work: Callable[[], None], name: str, kind: str, numel: int
    ) -> PendingCollective:
        def complete() -> None:
            with record_function(name):
                work()
            increment_version(self.data)

        self._window.offer(part)
        calls = self._calls_on(part)
        return PendingCollective(
            complete=complete,
            is_ready=lambda: self._window.is_offered(part),
            call=None if calls is None else calls.begin(kind, (numel,), self.data.dtype, ENQUEUED),
        )
