"""The ``auto`` schedule: the best that several searches find, with a proof of how good it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megacore import _core
from megacore.pipeline.timeline import Costs, entries

AUTO = "auto"

# Up to this many actions a thorough search is worth its time: a second or less on one core.
_THOROUGH_ACTIONS = 12_288
# A fast search of as many actions takes about 20 s, and so does one of as many stages, with whose
# square its time grows.
_MAX_ACTIONS = 2**24
_MAX_STAGES = 4096


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Proved properties of an ``auto`` schedule, for the costs and limits of its search.

    Attributes:
        makespan: Simulated time of the schedule, in the unit of the costs.
        bound: No order of actions has a smaller makespan: ``value``, ``reason``, ``explanation``
            and ``by_reason``, as in ``Schedule.lower_bound``.
        gap: By how much an order could be faster at most, ``makespan / bound - 1``.
        is_optimal: Whether no order is faster: the bound is reached, or a search left nothing out.
        winner: The method that found the schedule; the name of a schedule if that was the best.
        named: Makespans of the named schedules that solve the same problem within the memory
            limit, fastest first. The makespan is never above them.
        peak_memory: Peak memory of each rank, in the unit of the memory limit.
        num_scheduled: Actions scheduled in all trials.
        effort: How thorough the search was.
    """

    makespan: float
    bound: _core.LowerBound
    gap: float
    is_optimal: bool
    winner: str
    named: dict[str, float]
    peak_memory: list[int]
    num_scheduled: int
    effort: str

    def __str__(self) -> str:
        """Two or three lines for people."""
        verdict = (
            "no order of actions is faster"
            if self.is_optimal
            else f"within {self.gap:.2%} of the bound {self.bound.value:g}"
        )
        lines = [
            f"makespan {self.makespan:g}: {verdict} ({self.bound.explanation})",
            f"found by {self.winner}",
        ]
        if self.named:
            name, makespan = next(iter(self.named.items()))
            lines.append(f"the best named schedule that fits is {name} with {makespan:g}")
        return "\n".join(lines)


def build_auto(
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    placement: Literal["loop", "v"] | None = None,
    memory_limit: int | Sequence[int] | None = None,
    activation_size: int | Sequence[int] | None = None,
    split_backward: bool | None = None,
    costs: Costs | None = None,
    effort: Literal["fast", "thorough"] | None = None,
) -> tuple[_core.Schedule, Certificate]:
    """Search for a schedule; ``build_schedule`` describes the arguments and their defaults."""
    placement = "loop" if placement is None else placement
    if num_chunks is None:
        num_chunks = 2 if placement == "v" else 1
    costs = Costs() if costs is None else costs
    _require_searchable(num_ranks, num_chunks, num_microbatches)
    _require_sum(costs, num_ranks * num_chunks, num_microbatches)
    if effort is None:
        num_actions = 3 * num_ranks * num_chunks * num_microbatches
        effort = "thorough" if num_actions <= _THOROUGH_ACTIONS else "fast"
    if effort not in ("fast", "thorough"):
        raise ValueError(f"effort must be 'fast' or 'thorough', got {effort!r}")
    schedule, certificate = _core.auto_schedule(
        placement=placement,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        split_backward=split_backward is not False,
        memory_limit=_numbers("memory_limit", memory_limit, "rank"),
        activation_size=_numbers("activation_size", activation_size, "stage"),
        forward=entries(costs.forward),
        backward_input=entries(costs.backward_input),
        backward_weight=entries(costs.backward_weight),
        send=costs.send,
        overlap=costs.overlap,
        effort=_core.Effort.FAST if effort == "fast" else _core.Effort.THOROUGH,
    )
    return schedule, Certificate(
        makespan=certificate.makespan,
        bound=certificate.bound,
        gap=certificate.gap,
        is_optimal=certificate.is_optimal,
        winner=certificate.winner,
        named=certificate.named,
        peak_memory=certificate.peak_memory,
        num_scheduled=certificate.num_scheduled,
        effort=effort,
    )


def _require_searchable(num_ranks: int, num_chunks: int, num_microbatches: int) -> None:
    """Refuse sizes that would keep the search busy for minutes; those below 1 are refused later."""
    if min(num_ranks, num_chunks, num_microbatches) < 1:
        return
    num_stages = num_ranks * num_chunks
    if num_stages > _MAX_STAGES:
        raise ValueError(
            f"{num_ranks} ranks x {num_chunks} chunks are {num_stages} stages; 'auto' searches "
            f"with up to {_MAX_STAGES}: choose fewer, or a schedule by name"
        )
    if 3 * num_stages * num_microbatches > _MAX_ACTIONS:
        raise ValueError(
            f"num_microbatches is {num_microbatches}; with {num_stages} stages 'auto' searches "
            f"with up to {_MAX_ACTIONS // (3 * num_stages)}: choose fewer, or a schedule by name"
        )


def _require_sum(costs: Costs, num_stages: int, num_microbatches: int) -> None:
    """Raise an error if the sum of the costs may overflow, as a simulation does."""
    stages = [
        entries(cost) for cost in (costs.forward, costs.backward_input, costs.backward_weight)
    ]
    times = [costs.send, *(time for per_stage in stages for time in per_stage)]
    most = 5.0 * max(num_stages, 1) * max(num_microbatches, 1) * max(times, default=0.0)
    if all(map(math.isfinite, times)) and math.isinf(most):
        raise ValueError(
            "the costs add up to more than a number can hold; choose a larger unit of time"
        )


def _numbers(name: str, values: int | Sequence[int] | None, each: str) -> list[int]:
    if values is None:
        return []
    numbers = entries(values)
    if not numbers:
        raise ValueError(f"{name} has no entries; give one, or one per {each}, or leave it out")
    return numbers
