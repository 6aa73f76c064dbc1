"""All named schedules side by side, for the same ranks, microbatches and work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megacore._core import LowerBound, ScheduleInfo
from megacore.pipeline.build import build_schedule, schedule_catalog
from megacore.pipeline.schedule import Schedule
from megacore.pipeline.timeline import Costs, Timeline


@dataclass(frozen=True, kw_only=True)
class ComparedSchedule:
    """One schedule of a comparison.

    Attributes:
        schedule: The schedule.
        timeline: Its simulation. Times are those of the comparison; a stage that holds a v-th of a
            rank's layers takes a v-th of them.
        in_flight: Largest number of microbatches whose activations a rank holds, each counted as
            all layers of a rank; with two chunks a stage activation counts half.
        bound: What no order of actions beats with this placement, this kind of backward and this
            memory; ``None`` where overlapping pairs make it meaningless.
        parameters: What the generator chose or was given, by name: ``chunks``, ``group_size``,
            ``warmup_multiplier``, ``copies`` of the parameters.
        is_best: Whether no other schedule is both at least as fast and at least as small, and
            better in one of the two.
    """

    schedule: Schedule
    timeline: Timeline
    in_flight: float
    bound: LowerBound | None
    parameters: dict[str, int] = field(default_factory=dict)
    is_best: bool = False

    @property
    def gap(self) -> float | None:
        """Excess of the makespan over the bound, as a fraction of the bound."""
        if self.bound is None or self.bound.value <= 0:
            return None
        return max(self.timeline.makespan / self.bound.value - 1, 0.0)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Named schedules for the same sizes and costs.

    Attributes:
        rows: Those that exist, fastest first; of equally fast ones the smallest first.
        refused: The others by name, with the reason.
    """

    rows: Sequence[ComparedSchedule]
    refused: dict[str, str]


def compare_schedules(
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    group_size: int | None = None,
    warmup_multiplier: int | None = None,
    costs: Costs | None = None,
) -> Comparison:
    """Simulate every named schedule that these sizes allow.

    All do the same work: ``costs`` are those of all layers of a rank on one microbatch, and a
    schedule with v stages per rank has stages of a v-th of them. Messages take the same time in
    all.

    Args:
        num_ranks: Pipeline ranks.
        num_microbatches: Microbatches per step.
        num_chunks: For schedules that can have any number of chunks per rank; by default 2, or 1
            with a single rank.
        group_size: For schedules that take one.
        warmup_multiplier: For the schedule that takes one.
        costs: One number each; by default F = I = W = 1.

    Raises:
        ValueError: If sizes are below 1 or costs are given per stage.

    Example:
        >>> rows = compare_schedules(num_ranks=4, num_microbatches=8).rows
        >>> [(row.schedule.name, row.timeline.makespan, row.in_flight) for row in rows[:3]]
        [('interleaved_zb', 25.5, 4.0), ('zb_v', 25.5, 4.0), ('dualpipe', 26.0, 5.0)]
    """
    chunks = compared_chunks(num_ranks, num_chunks)
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": chunks}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    costs = costs or Costs()
    rows: list[ComparedSchedule] = []
    refused: dict[str, str] = {}
    for info in schedule_catalog():
        try:
            schedule = build_schedule(
                info.name,
                num_ranks=num_ranks,
                num_microbatches=num_microbatches,
                num_chunks=chunks if info.num_chunks == 0 else None,
                group_size=group_size if info.takes_group_size else None,
                warmup_multiplier=warmup_multiplier if info.takes_warmup_multiplier else None,
            )
        except ValueError as error:
            refused[info.name] = str(error)
        else:
            parameters = _parameters(info, schedule, warmup_multiplier)
            rows.append(_compared(schedule, costs, parameters))
    rows.sort(key=lambda row: (round(row.timeline.makespan, 9), row.in_flight))
    return Comparison(rows=_with_best_marked(rows), refused=refused)


def compared_chunks(num_ranks: int, num_chunks: int | None) -> int:
    """Chunks per rank of schedules that can have any number, if that many were asked for."""
    if num_chunks is not None:
        return num_chunks
    return 2 if num_ranks > 1 else 1


def compared_actions(*, num_ranks: int, num_microbatches: int, num_chunks: int | None) -> int:
    """Actions of all schedules of a comparison together, which its time grows with.

    Schedules that these sizes do not allow count as well.

    Example:
        >>> one, two = (compared_actions(num_ranks=4, num_microbatches=m, num_chunks=None)
        ...             for m in (8, 16))
        >>> one > 0, two / one
        (True, 2.0)
    """
    chunks = compared_chunks(num_ranks, num_chunks)
    per_microbatch = sum(
        (info.num_chunks or chunks) * (3 if info.splits_backward else 2)
        for info in schedule_catalog()
    )
    return num_ranks * num_microbatches * per_microbatch


def _compared(schedule: Schedule, costs: Costs, parameters: dict[str, int]) -> ComparedSchedule:
    # Stages per rank that one copy of the model is cut into.
    cuts = schedule.num_stages // (schedule.num_chains * schedule.num_ranks)
    stage_costs = Costs(
        forward=_share(costs.forward, cuts),
        backward_input=_share(costs.backward_input, cuts),
        backward_weight=_share(costs.backward_weight, cuts),
        send=costs.send,
        overlap=costs.overlap,
    )
    timeline = schedule.simulate(stage_costs)
    has_pairs = any(schedule.overlaps(rank) for rank in range(schedule.num_ranks))
    bound = None
    if costs.overlap == 0 or not has_pairs:
        bound = schedule.lower_bound(replace(stage_costs, overlap=0.0))
    return ComparedSchedule(
        schedule=schedule,
        timeline=timeline,
        in_flight=max(timeline.peak_in_flight) / cuts,
        bound=bound,
        parameters=parameters,
    )


def _share(cost: float | Sequence[float], cuts: int) -> float:
    if isinstance(cost, Sequence):
        raise ValueError(
            "costs per stage cannot be compared, as schedules cut the model differently; give one "
            "number for all layers of a rank"
        )
    return cost / cuts


def _parameters(
    info: ScheduleInfo, schedule: Schedule, warmup_multiplier: int | None
) -> dict[str, int]:
    parameters = {"chunks": schedule.num_chunks // schedule.num_chains}
    if info.takes_group_size and schedule.num_chunks > 1:
        parameters["group_size"] = _group_size(schedule)
    if info.takes_warmup_multiplier:
        parameters["warmup_multiplier"] = 2 if warmup_multiplier is None else warmup_multiplier
    if schedule.num_chains > 1:
        parameters["copies"] = schedule.num_chains
    return parameters


def _group_size(schedule: Schedule) -> int:
    """Forwards of the first rank's first chunk before its second one has a turn."""
    forwards = [chunk for chunk in schedule.order(0) if chunk > 0]
    return forwards.index(2)


def _with_best_marked(rows: Sequence[ComparedSchedule]) -> list[ComparedSchedule]:
    """Rows are sorted by time, then memory: one is best if it is smaller than all before it."""
    smallest, marked = float("inf"), []
    for row in rows:
        is_best = row.in_flight < smallest
        smallest = min(smallest, row.in_flight)
        marked.append(replace(row, is_best=is_best))
    return marked
