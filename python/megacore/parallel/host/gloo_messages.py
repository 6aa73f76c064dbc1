"""Reduce-scatter and all-gather of CPU tensors between hosts, by messages of gloo.

gloo's own reduce-scatter and all-gather take two to three times as long as its messages, and an
exchange of all slices before the first sum needs fresh memory of the size of the tensor
(``benchmarks/bench_collectives.py``). Here each rank sends every other rank its slice directly, as
many bytes as a ring:

- a reduce-scatter in chunks, of which a few are in flight while the last one is added, also across
  the calls that are started one after another;
- an all-gather in place.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup, Work

from megacore._core import reduce_parts
from megacore.parallel.host.shared_memory import HOST_DTYPES, HOST_REDUCTIONS

# Received chunks in flight, and their bytes over all senders. More would leave the cache, fewer
# would wait for every message.
_IN_FLIGHT = 3
_CHUNK_BYTES = 4 << 20
_LEAST_CHUNK_BYTES = 1 << 16
# Pipeline stages and experts number their messages from 0.
_FIRST_TAG, _NUM_TAGS = 1 << 29, 1 << 20


@dataclass(frozen=True, kw_only=True)
class _Reduction:
    """One reduce-scatter: flat output, and the slices of the input, ``(members, n)``."""

    output: Tensor
    slices: Tensor
    average: bool
    tag: int
    done: Future[None]


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Equal ranges of all slices of a reduction, while the messages are in flight."""

    reduction: _Reduction
    output: Tensor
    parts: list[Tensor]
    works: list[Work]
    is_last: bool


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
        self._reductions: queue.SimpleQueue[_Reduction | None] | None = None

    def start_reduce_scatter(self, output: Tensor, input: Tensor, *, average: bool) -> Future[None]:
        """Start `megacore.parallel.collectives.reduce_scatter` in a thread of this group."""
        reduction = _Reduction(
            output=output.view(-1),
            slices=input.view(self._size, -1),
            average=average,
            tag=self._tag(),
            done=Future(),
        )
        if self._reductions is None:
            self._reductions = queue.SimpleQueue()
            reducer = _Reducer(self._handle, self._position, self._others, self._reductions)
            threading.Thread(target=reducer.run, name="megacore messages", daemon=True).start()
            weakref.finalize(self, self._reductions.put, None)
        self._reductions.put(reduction)
        return reduction.done

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


class _Reducer:
    """The thread of a group that exchanges and adds the chunks of its reductions, in order.

    The next reduction starts while the chunks of the last one are in flight, so the connection does
    not run empty in between.
    """

    def __init__(
        self,
        handle: ProcessGroup,
        position: int,
        others: list[int],
        reductions: queue.SimpleQueue[_Reduction | None],
    ) -> None:
        self._handle, self._position, self._others = handle, position, others
        self._reductions = reductions
        self._unstarted: Iterator[tuple[_Reduction, int]] = iter(())
        self._in_flight: deque[_Chunk] = deque()
        self._has_ended = False
        # Memory of received chunks, kept: fresh pages for every call would cost more than the sum.
        self._slots: deque[Tensor] = deque()

    @torch.no_grad()
    def run(self) -> None:
        """Work until the queue has ``None``."""
        while self._start_chunks():
            chunk = self._in_flight.popleft()
            done = chunk.reduction.done
            try:
                for work in chunk.works:
                    work.wait()
                _add_in_order(chunk.output, chunk.parts, average=chunk.reduction.average)
            except BaseException as error:  # for the thread that waits
                self._fail(done, error)
            else:
                if chunk.is_last and not done.done():
                    done.set_result(None)
            del chunk, done

    def _start_chunks(self) -> bool:
        """Start chunks until enough are in flight; return False at the end."""
        while len(self._in_flight) < _IN_FLIGHT:
            following = next(self._unstarted, None)
            if following is None:
                if self._has_ended:
                    return bool(self._in_flight)
                try:
                    reduction = self._reductions.get(block=not self._in_flight)
                except queue.Empty:
                    return True
                if reduction is None:
                    self._has_ended = True
                    return bool(self._in_flight)
                self._unstarted = _chunks(reduction, len(self._others) + 1)
                del reduction
                continue
            try:
                self._in_flight.append(self._start(*following))
            except BaseException as error:
                self._fail(following[0].done, error)
            del following
        return True

    def _start(self, reduction: _Reduction, first: int) -> _Chunk:
        slices, own = reduction.slices, self._position
        length = chunk_length(len(self._others) + 1, slices.element_size())
        part = slices[:, first : first + length]
        received = self._slot(part)
        works = [self._handle.recv([received[p]], p, reduction.tag) for p in self._others]
        works += [self._handle.send([part[p]], p, reduction.tag) for p in self._others]
        return _Chunk(
            reduction=reduction,
            output=reduction.output[first : first + length],
            parts=[part[p] if p == own else received[p] for p in range(slices.shape[0])],
            works=works,
            is_last=first + length >= slices.shape[1],
        )

    def _slot(self, part: Tensor) -> dict[int, Tensor]:
        """Return memory for the chunk of each other member, of the size of a row of ``part``."""
        if len(self._slots) < _IN_FLIGHT:
            most = -(-chunk_length(len(self._others) + 1, 1) // 16) * 16  # rows keep alignment
            slot = torch.empty(len(self._others), most, dtype=torch.uint8)
        else:
            slot = self._slots.popleft()
        self._slots.append(slot)
        row = part[0]
        rows = [each[: row.nbytes].view(row.dtype) for each in slot]
        return dict(zip(self._others, rows, strict=True))

    def _fail(self, done: Future[None], error: BaseException) -> None:
        if not done.done():
            done.set_exception(error)
        self._slots.clear()  # messages of the failed call may still arrive in the old ones


def _chunks(reduction: _Reduction, size: int) -> Iterator[tuple[_Reduction, int]]:
    """Yield the reduction with the first element of each of its chunks."""
    for first in range(
        0, reduction.slices.shape[1], chunk_length(size, reduction.slices.element_size())
    ):
        if reduction.done.done():  # it has failed
            return
        yield reduction, first


def chunk_length(size: int, element_size: int) -> int:
    """Return the elements that each of ``size`` members sends another one in a message.

    Example:
        >>> [chunk_length(size, 4) for size in (2, 4, 512)]
        [1048576, 349525, 16384]
    """
    return max(_CHUNK_BYTES // (size - 1), _LEAST_CHUNK_BYTES) // element_size


def _add_in_order(output: Tensor, parts: list[Tensor], *, average: bool) -> None:
    """Sum parts in their order, in float32 for bfloat16 and float16; ``output`` may be a part."""
    reduce_parts(
        parts=[part.data_ptr() for part in parts],
        numel=output.numel(),
        dtype=HOST_DTYPES[parts[0].dtype],
        op=HOST_REDUCTIONS["avg" if average else "sum"],
        output=output.data_ptr(),
        output_dtype=HOST_DTYPES[output.dtype],
    )
    increment_version(output)
