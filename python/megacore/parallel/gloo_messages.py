"""Reduce-scatter and all-gather of CPU tensors between hosts, by messages of gloo.

gloo's own reduce-scatter and all-gather take two to three times as long as its messages, and an
exchange of all slices before the first sum needs fresh memory of the size of the tensor
(``benchmarks/bench_collectives.py``). Here each rank sends every other rank its slice directly, as
many bytes as a ring:

- a reduce-scatter in chunks, of which a few are in flight while the last one is added;
- an all-gather in place.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

# Received chunks in flight, and their bytes over all senders. More would leave the cache, fewer
# would wait for every message.
_IN_FLIGHT = 3
_CHUNK_BYTES = 4 << 20
_LEAST_CHUNK_BYTES = 1 << 16
# Pipeline stages and experts number their messages from 0.
_FIRST_TAG, _NUM_TAGS = 1 << 29, 1 << 20

_Job = tuple[Callable[[], None], "Future[None]"]


class GlooMessages:
    """Collectives of one gloo group by messages; members must start them in the same order.

    Calls in flight at the same time do not mix: each has a tag.

    Args:
        handle: The torch group.
        position: Position of this rank in it.
        size: Number of members.
    """

    def __init__(self, handle: ProcessGroup, position: int, size: int) -> None:
        self._handle, self._position, self._size = handle, position, size
        self._others = [(position + step) % size for step in range(1, size)]
        self._num_calls = 0
        self._jobs: queue.SimpleQueue[_Job | None] | None = None

    def reduce_scatter(self, output: Tensor, input: Tensor, *, average: bool) -> None:
        """Reduce as `megacore.parallel.collectives.reduce_scatter`; returns when it is done."""
        self._reduce_scatter(output.view(-1), input.view(self._size, -1), average, self._tag())

    def start_reduce_scatter(self, output: Tensor, input: Tensor, *, average: bool) -> Future[None]:
        """Start :meth:`reduce_scatter` in a thread of this group."""
        args = output.view(-1), input.view(self._size, -1), average, self._tag()
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(
                target=_run, args=(self._jobs,), name="megacore messages", daemon=True
            ).start()
            weakref.finalize(self, self._jobs.put, None)
        future: Future[None] = Future()
        self._jobs.put((lambda: self._reduce_scatter(*args), future))
        return future

    def start_all_gather(self, output: Tensor, input: Tensor) -> list[Work]:
        """Start `megacore.parallel.collectives.all_gather`: it is done when all works are."""
        slices, own, tag = output.view(self._size, -1), input.view(-1), self._tag()
        if own.numel() == 0:
            return []
        works = [self._handle.recv([slices[other]], other, tag) for other in self._others]
        works += [self._handle.send([own], other, tag) for other in self._others]
        if slices[self._position].data_ptr() != own.data_ptr():
            slices[self._position].copy_(own)
        return works

    def _tag(self) -> int:
        self._num_calls += 1
        return _FIRST_TAG + self._num_calls % _NUM_TAGS

    @torch.no_grad()
    def _reduce_scatter(self, output: Tensor, slices: Tensor, average: bool, tag: int) -> None:
        length = chunk_length(self._size, slices.element_size())
        starts = range(0, output.numel(), length)
        # Row p of a slot has the chunk of position p; that of this rank is unused.
        slots = slices.new_empty(
            min(_IN_FLIGHT, len(starts)), self._size, min(length, output.numel())
        )
        works: list[list[Work]] = []

        def start(index: int) -> None:
            part = slices[:, starts[index] : starts[index] + length]
            slot = slots[index % _IN_FLIGHT][:, : part.shape[1]]
            received = [self._handle.recv([slot[p]], p, tag) for p in self._others]
            works.append([*received, *(self._handle.send([part[p]], p, tag) for p in self._others)])

        for index in range(min(_IN_FLIGHT, len(starts))):
            start(index)
        for index, first in enumerate(starts):
            for work in works[index]:
                work.wait()
            works[index] = []
            mine = slices[self._position, first : first + length]
            parts = list(slots[index % _IN_FLIGHT][:, : mine.numel()])
            parts[self._position] = mine
            target = output[first : first + length]
            _add_in_order(target, parts, self._position, average=average)
            if index + _IN_FLIGHT < len(starts):
                start(index + _IN_FLIGHT)


def chunk_length(size: int, element_size: int) -> int:
    """Return the elements that each of ``size`` members sends another one in a message.

    Example:
        >>> [chunk_length(size, 4) for size in (2, 4, 512)]
        [1048576, 349525, 16384]
    """
    return max(_CHUNK_BYTES // (size - 1), _LEAST_CHUNK_BYTES) // element_size


def _add_in_order(output: Tensor, parts: list[Tensor], own: int, *, average: bool) -> None:
    """Sum at least two parts in their order, in float32 for bfloat16 and float16.

    ``output`` may be the part ``own``, which is not changed otherwise; the other parts may be.
    """
    narrow = parts[0].dtype in (torch.bfloat16, torch.float16)
    wide = torch.float32 if narrow else parts[0].dtype
    total = None
    if not narrow and output.dtype == wide:
        total = output if own < 2 else parts[0]
    total = torch.add(parts[0].to(wide), parts[1], out=total)
    for part in parts[2:]:
        total.add_(part)
    if average:
        total.div_(len(parts))
    if total is not output:
        output.copy_(total)


def _run(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        call, future = job
        try:
            call()
        except BaseException as error:  # for the thread that waits
            future.set_exception(error)
        else:
            future.set_result(None)
        del call, future, job
