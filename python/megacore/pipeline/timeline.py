"""When actions run: costs, the simulated timeline, and its picture in text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megacore._core import Action

# Durations that share a unit at least this fraction of the shortest one are drawn exactly.
_FINEST_UNIT = 1 / 8


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times of one stage on one microbatch, in any unit.

    Each of the first three is one number for all stages, or a sequence with one per stage. A fused
    backward (B) takes ``backward_input + backward_weight``.

    Attributes:
        forward: Time of F.
        backward_input: Time of I, the gradient of a stage's input.
        backward_weight: Time of W, the gradients of its weights.
        send: Latency of a message between two ranks; it occupies neither of them.
    """

    forward: float | Sequence[float] = 1.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    send: float = 0.0


class Event(NamedTuple):
    """One action in time."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A schedule in time, in the unit of its costs.

    Attributes:
        makespan: End of the last action.
        bubble_fraction: Share of ``num_ranks * makespan`` in which a rank idles.
        busy: Time each rank spends in actions.
        peak_in_flight: Largest number of (stage, microbatch) pairs whose activations each rank
            holds at once.
        events: All actions, rank after rank, in execution order.
    """

    makespan: float
    bubble_fraction: float
    busy: list[float]
    peak_in_flight: list[int]
    events: list[Event]

    def to_text(self) -> str:
        """Draw the timeline with one row per rank and time going right.

        An action stands where it starts, with a dash for each further character it takes.
        """
        unit = time_unit(self.events)
        columns = [
            (e.rank, str(e.action), round(e.start / unit), round(e.end / unit)) for e in self.events
        ]
        num_columns = max((end for *_, end in columns), default=0)
        width = max([len(str(num_columns)), *(len(text) for _, text, *_ in columns)]) + 1
        rows = [[" " * width] * num_columns for _ in self.busy]
        for rank, text, start, end in columns:
            span = (text.ljust((end - start) * width - 1, "-") + " ") if end > start else ""
            for i in range(end - start):
                rows[rank][start + i] = span[i * width : (i + 1) * width]
        label_width = len(f"rank {len(rows) - 1}") + 2
        header = "".join(f"{column * unit:<{width}g}"[:width] for column in range(num_columns))
        lines = ["time".ljust(label_width) + header]
        lines += [f"rank {i}".ljust(label_width) + "".join(row) for i, row in enumerate(rows)]
        return "\n".join(line.rstrip() for line in lines)


def time_unit(events: Iterable[Event]) -> float:
    """Return the time one column of a text picture stands for.

    The greatest common divisor of all durations, unless it is far below the shortest of them; then
    the shortest, and columns are rounded.
    """
    durations = {round(e.end - e.start, 9) for e in events if e.end > e.start}
    if not durations:
        return 1.0
    shortest = min(durations)
    unit = 0.0
    for duration in durations:
        unit = _common_divisor(unit, duration, tolerance=shortest * 1e-6)
    return unit if unit >= shortest * _FINEST_UNIT else shortest


def _common_divisor(a: float, b: float, *, tolerance: float) -> float:
    while b > tolerance:
        remainder = math.fmod(a, b)
        a, b = b, 0.0 if b - remainder <= tolerance else remainder
    return a
