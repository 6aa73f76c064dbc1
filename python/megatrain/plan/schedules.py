"""Schedules of runs and of predicted layouts, each built once in a process."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from megacore.pipeline import Schedule, build_schedule
from megatrain.config.schedule_file import ScheduleFile
from megatrain.plan.spec import RunSpec


class ScheduleShape(NamedTuple):
    """Settings and sizes that determine the schedule of a run.

    Attributes:
        name: As `pipeline.schedule`; of a file, its path.
        num_ranks: Pipeline ranks.
        num_microbatches: Microbatches per step.
        num_chunks: Stages of a rank.
        group_size: As `pipeline.group_size`.
        memory_limit: As `pipeline.memory_limit`.
        pairs: As of ``build_schedule``.
        file: Content of `pipeline.schedule_file`, which has one set of sizes.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    num_chunks: int
    group_size: int | None
    memory_limit: int | None
    pairs: Literal["whole", "split"] | None
    placement: Literal["loop", "v"] | None
    file: ScheduleFile | None = None


def schedule_shape(spec: RunSpec, num_microbatches: int) -> ScheduleShape:
    """Return what determines the schedule of a layout with so many microbatches."""
    return ScheduleShape(
        spec.schedule,
        spec.pp,
        num_microbatches,
        spec.chunks,
        spec.group_size,
        spec.memory_limit,
        spec.pairs,
        spec.placement,
        spec.schedule_file,
    )


@lru_cache(maxsize=256)
def cached_schedule(shape: ScheduleShape) -> Schedule:
    """Build a schedule, or return the one that was built before.

    Raises:
        ValueError: If the sizes cannot work, or are not those of the file.
    """
    if shape.file is not None:
        schedule = shape.file.schedule
        found = (schedule.num_ranks, schedule.num_microbatches, schedule.num_chunks)
        if found != (shape.num_ranks, shape.num_microbatches, shape.num_chunks):
            raise ValueError(
                f"{shape.file.path} must be for {shape.num_ranks} ranks, {shape.num_microbatches} "
                f"microbatches and {shape.num_chunks} chunks per rank, got {found[0]}, {found[1]} "
                f"and {found[2]}"
            )
        return schedule
    return build_schedule(
        shape.name,
        num_ranks=shape.num_ranks,
        num_microbatches=shape.num_microbatches,
        num_chunks=shape.num_chunks,
        group_size=shape.group_size,
        memory_limit=shape.memory_limit,
        pairs=shape.pairs,
        placement=shape.placement,
    )
