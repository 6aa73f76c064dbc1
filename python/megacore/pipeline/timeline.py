"""Timing of actions: costs, the simulated timeline, and its text picture."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar, cast

from megacore import _core
from megacore._core import Action

_Number = TypeVar("_Number", int, float)

# Durations that share a unit at least this fraction of the shortest one are drawn exactly.
_FINEST_UNIT = 1 / 8
# No picture has more columns than the first number and the second one for every action of a rank.
_MAX_COLUMNS = 10_000
_MAX_COLUMNS_PER_ACTION = 100


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
        overlap: Share of the shorter action of an overlapping pair that the longer one hides, from
            0 to 1; see ``Schedule.overlaps``.
    """

    forward: float | Sequence[float] = 1.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    send: float = 0.0
    overlap: float = 0.0


def entries(value: _Number | Sequence[_Number]) -> list[_Number]:
    """One number as a list, or the numbers of a sequence or an array.

    Example:
        >>> entries(2.0), entries((1.0, 2.0))
        ([2.0], [1.0, 2.0])
    """
    # Arrays are not a Sequence; arrays without a dimension are one number.
    is_one = not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0
    return [cast(_Number, value)] if is_one else list(cast(Sequence[_Number], value))


class Event(NamedTuple):
    """One action in time."""

    rank: int
    action: Action
    start: float
    end: float


class Timeline:
    """A schedule in time, in the unit of its costs. Made by ``Schedule.simulate``.

    Attributes:
        makespan: End of the last action.
        bubble_fraction: Share of ``num_ranks * makespan`` in which a rank idles; see
            ``span_bubble_fraction`` for the other bubble.
        busy: Time each rank spends in actions.
        peak_in_flight: Largest number of (stage, microbatch) pairs whose activations each rank
            holds at once.
        exposed: Time that each rank idles only because a message is in flight: its immediate saving
            if messages took no time.
    """

    def __init__(self, schedule: _core.Schedule, times: _core.Timeline) -> None:
        self._schedule = schedule
        self._times = times
        self.makespan: float = times.makespan
        self.bubble_fraction: float = times.bubble_fraction
        self.busy: list[float] = times.busy
        self.peak_in_flight: list[int] = times.peak_in_flight
        self.exposed: list[float] = times.exposed

    def __repr__(self) -> str:
        return (
            f"<Timeline: {len(self.busy)} ranks, makespan {self.makespan:g}, "
            f"bubble {self.bubble_fraction:.1%}>"
        )

    @cached_property
    def rank_spans(self) -> list[float]:
        """Time from the first start to the last end of each rank."""
        spans, result, begin = self._times.spans, [], 0
        for rank in range(self._schedule.num_ranks):
            end = begin + len(self._schedule.actions(rank))
            result.append(spans[end - 1][1] - spans[begin][0] if end > begin else 0.0)
            begin = end
        return result

    @property
    def span_bubble_fraction(self) -> float:
        """The bubble if ranks need not wait for each other between steps.

        A step then takes as long as the longest of ``rank_spans``, not the makespan, and this is
        the share of ``num_ranks`` times that in which a rank idles. It is what stays of the bubble
        when the optimizer steps without a barrier over the pipeline.

        Example:
            >>> from megacore.pipeline import build_schedule
            >>> timeline = build_schedule("zb_h2", num_ranks=2, num_microbatches=4).simulate()
            >>> timeline.bubble_fraction > 0, timeline.span_bubble_fraction
            (True, 0.0)
        """
        longest = max(self.rank_spans)
        return 1 - sum(self.busy) / (len(self.busy) * longest) if longest > 0 else 0.0

    @cached_property
    def events(self) -> list[Event]:
        """All actions with their times, rank after rank, in execution order."""
        return self.first_ranks(self._schedule.num_ranks)

    @cached_property
    def critical_path(self) -> list[Event]:
        """A chain of actions that determines the makespan, in the order of time.

        Each starts when the one before it ends, or when the message of that one arrives. Making any
        other action faster does not make the step faster.

        Example:
            >>> from megacore.pipeline import build_schedule
            >>> timeline = build_schedule("1f1b", num_ranks=2, num_microbatches=2).simulate()
            >>> " ".join(str(event.action) for event in timeline.critical_path)
            '0F0 1F0 1B0 1F1 1B1 0B1'
        """
        events = self.events
        return [events[index] for index in self._schedule.critical_path(self._times)]

    def first_ranks(self, count: int) -> list[Event]:
        """The events of the lowest ``count`` ranks, for pictures that show few of many ranks."""
        ranks = range(min(count, self._schedule.num_ranks))
        actions = [(rank, action) for rank in ranks for action in self._schedule.actions(rank)]
        spans = self._times.spans[: len(actions)]
        return [
            Event(rank, action, start, end)
            for (rank, action), (start, end) in zip(actions, spans, strict=True)
        ]

    def to_text(self) -> str:
        """Draw the timeline with one row per rank and time going right.

        An action is printed at its start, followed by dashes while it runs.
        """
        grid = Grid.of(self.events)
        return "\n".join(grid.lines(0, grid.num_columns))


class GridCell(NamedTuple):
    """One action in columns of equal time."""

    rank: int
    action: Action
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A timeline in columns of equal time, for pictures in text.

    Attributes:
        cells: The actions.
        num_ranks: Rows.
        num_columns: Columns until the last end.
        unit: Time of one column.
    """

    cells: list[GridCell]
    num_ranks: int
    num_columns: int
    unit: float

    @staticmethod
    def of(events: Iterable[Event], *, makespan: float = 0.0) -> Grid:
        """Cut time into columns: exactly where durations have a common unit, else rounded.

        Args:
            events: Events to show.
            makespan: Where the columns end at the least, if other ranks are busy for longer.
        """
        events = list(events)
        end = max([makespan, *(event.end for event in events)])
        longest_row = max(Counter(event.rank for event in events).values(), default=0)
        unit = max(
            _time_unit(events, end),
            end / (_MAX_COLUMNS + _MAX_COLUMNS_PER_ACTION * longest_row),
        )
        cells = [
            GridCell(rank, action, math.floor(start / unit + 0.5), math.floor(end / unit + 0.5))
            for rank, action, start, end in events
        ]
        return Grid(
            cells=cells,
            num_ranks=max((cell.rank for cell in cells), default=-1) + 1,
            num_columns=math.floor(end / unit + 0.5),
            unit=unit,
        )

    @property
    def label_width(self) -> int:
        """Characters before the first column."""
        return len(f"rank {self.num_ranks - 1}") + 2

    @cached_property
    def cell_width(self) -> int:
        """Characters per column in ``lines``."""
        texts = [len(str(cell.action)) for cell in self.cells]
        return max([len(f"{self.num_columns * self.unit:g}"), *texts]) + 1

    def cells_between(self, begin: int, end: int) -> list[GridCell]:
        """The actions that are seen in columns ``begin`` to ``end``."""
        return [cell for cell in self.cells if cell.begin < end and cell.end > begin]

    def lines(self, begin: int, end: int) -> list[str]:
        """Return a line with the times and one line per rank, for columns ``begin`` to ``end``."""
        width = self.cell_width
        rows = [[" " * width] * (end - begin) for _ in range(self.num_ranks)]
        for rank, action, first, last in self.cells_between(begin, end):
            text = str(action).ljust((last - first) * width - 1, "-") + " "
            for column in range(max(first, begin), min(last, end)):
                offset = (column - first) * width
                rows[rank][column - begin] = text[offset : offset + width]
        times = "".join(
            f"{column * self.unit:g}"[: width - 1].ljust(width) for column in range(begin, end)
        )
        labelled = [("time", times)]
        labelled += [(f"rank {rank}", "".join(row)) for rank, row in enumerate(rows)]
        return [(label.ljust(self.label_width) + row).rstrip() for label, row in labelled]


def _time_unit(events: Iterable[Event], makespan: float) -> float:
    """Return the greatest common divisor of all durations, or the shortest if that is far below.

    Durations are differences of times up to the makespan: 12 of its digits are trusted.
    """
    digits = 12 - math.ceil(math.log10(makespan)) if makespan > 0 else 0
    durations = {round(end - start, digits) for *_, start, end in events} - {0.0}
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
