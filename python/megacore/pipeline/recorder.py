"""Recording of the times of a step's actions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from megacore._core import Action


class TimedAction(NamedTuple):
    """One measured action.

    Attributes:
        rank: The rank given to the recorder.
        action: Text of the action, e.g. ``"2F0"``.
        start_us: Start in microseconds, on the clock of ``time.perf_counter_ns``.
        end_us: End in microseconds.
    """

    rank: int
    action: str
    start_us: float
    end_us: float


class ActionRecorder:
    """Records start and end of actions; give one to a ``PipelineExecutor``.

    Recorded are the compute actions, without the time they wait for their input, and those waits as
    the receives they belong to (``RECV_F``, ``RECV_B``). Ranks on one machine share the clock; each
    machine's starts somewhere else.

    Args:
        rank: Written into every event, usually the global rank.
        synchronize: Called before each time stamp. Give ``torch.cuda.synchronize`` for GPUs, where
            work is queued and would else seem to take no time.

    Example:
        >>> recorder = ActionRecorder(rank=1)
        >>> with recorder.record(Action.parse("1F0")):
        ...     pass
        >>> [(event.rank, event.action) for event in recorder.events()]
        [(1, '1F0')]
    """

    def __init__(self, *, rank: int, synchronize: Callable[[], None] | None = None) -> None:
        self._rank = rank
        self._synchronize = synchronize
        self._spans: list[tuple[Action, int, int]] = []

    @contextmanager
    def record(self, action: Action) -> Iterator[None]:
        """Record the time spent inside ``with``, if it ends without an exception."""
        start = self._now_ns()
        yield
        self._spans.append((action, start, self._now_ns()))

    def events(self) -> list[TimedAction]:
        """Return the recorded actions, in the order of their ends."""
        return [
            TimedAction(self._rank, str(action), start / 1e3, end / 1e3)
            for action, start, end in self._spans
        ]

    def clear(self) -> None:
        """Forget everything recorded."""
        self._spans.clear()

    def _now_ns(self) -> int:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter_ns()
