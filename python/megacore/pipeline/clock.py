"""Time of a step by phase, on the clock of the device that does the work."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.profiler import record_function


class PhaseClock:
    """Sums of the times of phases; on a GPU between events of the current stream.

    Args:
        device: Device of the model.

    Attributes:
        enabled: Measure at all.

    Example:
        >>> clock = PhaseClock(torch.device("cpu"))
        >>> with clock.phase("optimizer"):
        ...     time.sleep(0.01)
        >>> 0.01 <= clock.take()["optimizer"] < 1
        True
    """

    def __init__(self, device: torch.device) -> None:
        self.enabled = True
        self._on_device = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str, *, on_host: bool = False) -> Iterator[None]:
        """Add the time inside ``with`` to a phase, which is also a named range of the profiler.

        Args:
            name: Name of the phase.
            on_host: Use the clock of the host on a GPU too.

        Sync:
            None.
        """
        with named_range(name):
            if not self.enabled:
                yield
            elif on_host or not self._on_device:
                start = time.perf_counter()
                try:
                    yield
                finally:
                    self._seconds[name] += time.perf_counter() - start
            elif torch.cuda.is_current_stream_capturing():
                yield  # a graph cannot record events that are read after each replay
            else:
                first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                first.record()
                try:
                    yield
                finally:
                    last.record()
                    self._events.append((name, first, last))

    def clear(self) -> None:
        """Forget everything measured."""
        self._events.clear()
        self._seconds.clear()

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call.

        On a GPU, call it after waiting for the device: it does not wait itself.
        """
        for name, first, last in self._events:
            self._seconds[name] += first.elapsed_time(last) / 1e3
        seconds = dict(self._seconds)
        self.clear()
        return seconds


def in_phase(clock: PhaseClock | None, name: str) -> AbstractContextManager[None]:
    """Return the context of a phase; without a clock an empty one."""
    return nullcontext() if clock is None else clock.phase(name)


def named_range(name: str) -> AbstractContextManager[object]:
    """Return a named range of torch's profiler; an empty context while it is off."""
    return record_function(name) if _profiler_enabled() else nullcontext()
