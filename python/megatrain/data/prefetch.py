"""Microbatches of the next steps, made while a step computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread

from megacore.parallel.batch import Microbatch

MakeBatch = Callable[[int, int], Microbatch]
# Work of the thread in its order; ``None`` ends it.
_Tasks = SimpleQueue[Callable[[], None] | None]


class Prefetch:
    """Source of microbatches that makes those of the next steps ahead, in one thread.

    A microbatch is a function of its step and number, so nothing depends on the thread, and there
    is no state to save. An error of the thread is raised where the microbatch is taken.

    Args:
        make: Makes the microbatch of a step and number.
        num_microbatches: Microbatches per step.
        end: No step from this one on is made ahead.
        depth: Steps made ahead at most; default: 2, more if a step has few microbatches.

    Example:
        >>> import torch
        >>> def make(step, number):
        ...     ids = torch.tensor([10 * step + number])
        ...     return Microbatch(tokens=ids[:, None], labels=None, sample_ids=ids, step=step)
        >>> source = Prefetch(make, num_microbatches=2, end=3)
        >>> [source(step, number).sample_ids.item() for step in (1, 2) for number in range(2)]
        [10, 11, 20, 21]
    """

    def __init__(
        self, make: MakeBatch, *, num_microbatches: int, end: int, depth: int | None = None
    ) -> None:
        if depth is None:
            depth = min(8, max(2, 16 // num_microbatches))
        self._make = make
        self._num_microbatches = num_microbatches
        self._end = end
        self._depth = depth
        self._ahead: dict[int, Future[list[Microbatch]]] = {}
        self._step: int | None = None
        self._batches: list[Microbatch] = []
        self._tasks: _Tasks | None = None

    def __call__(self, step: int, number: int) -> Microbatch:
        """Return a microbatch; waits if it is not made yet.

        Raises:
            DataError: As the data do.
        """
        if step != self._step:
            self._take(step)
        return self._batches[number]

    def _take(self, step: int) -> None:
        wanted = range(step, max(step + 1, min(step + 1 + self._depth, self._end)))
        for other in [other for other in self._ahead if other not in wanted]:
            self._ahead.pop(other).cancel()
        if self._tasks is None:
            self._tasks = self._start_thread()
        # Several steps at once: threads that take turns for the interpreter slow a short step.
        is_low = step not in self._ahead or len(self._ahead) <= max(1, self._depth // 2)
        for other in wanted if is_low else ():
            if other not in self._ahead:
                made = self._ahead[other] = Future()
                self._tasks.put(
                    partial(_make_step, made, self._make, other, self._num_microbatches)
                )
        self._batches = self._ahead.pop(step).result()
        self._step = step

    def _start_thread(self) -> _Tasks:
        tasks: _Tasks = SimpleQueue()
        # A daemon, because a read from a dead disk must not keep the process from its end.
        Thread(target=_run_all, args=(tasks,), name="data of the next steps", daemon=True).start()
        # While it waits, the thread has no reference to this object, and ends with it.
        weakref.finalize(self, tasks.put, None).atexit = False
        return tasks


def _run_all(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task


def _make_step(
    made: Future[list[Microbatch]], make: MakeBatch, step: int, num_microbatches: int
) -> None:
    if not made.set_running_or_notify_cancel():
        return
    try:
        made.set_result([make(step, number) for number in range(num_microbatches)])
    except BaseException as error:
        made.set_exception(error)
