"""The ``[pipeline]`` section: the schedule and the partition of layers into stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from megacore._core import ScheduleInfo, schedule_catalog
from megatrain.config.base import Section
from megatrain.config.schedule_file import ScheduleFile, read_schedule_file

# Searched for with the costs and memory of the run, instead of generated.
SEARCHED = "auto"
DEFAULT_SCHEDULE = "1f1b"
SCHEDULES = (*(info.name for info in schedule_catalog()), SEARCHED)


def schedule_info(name: str) -> ScheduleInfo | None:
    """Return the catalog entry of a schedule; ``None`` if it is searched for."""
    return next((info for info in schedule_catalog() if info.name == name), None)


if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[SCHEDULES]


class PipelineConfig(Section):
    """``[pipeline]``: the schedule and the partition of layers into stages."""

    schedule: ScheduleName | None = Field(
        default=None,
        description="Order of forward and backward passes; `megacore schedule --compare` lists "
        "all schedules for given sizes. `auto` searches for the best one; `dualpipe` holds two "
        "copies of the model in each pipeline. Default: `1f1b`, if there is no `schedule_file`.",
    )
    schedule_file: str | None = Field(
        default=None,
        min_length=1,
        description="File with a schedule of your own, instead of `schedule`: PyTorch's CSV of "
        "compute actions, which `megacore schedule NAME --csv FILE` writes and `--from-csv FILE` "
        "draws. It is proved before the start, and must be for the ranks, stages and microbatches "
        "of the run, whose folder keeps a copy. Default: a named schedule.",
    )
    num_chunks: int | None = Field(
        default=None,
        ge=1,
        description="Model chunks per pipeline rank. Default: fixed by the schedule; otherwise 2, "
        "or 1 for `no_pipelining` and `auto`.",
    )
    placement: Literal["loop", "v"] = Field(
        default="loop",
        description="For `auto`: stages in a loop over the ranks, or down the ranks and back up.",
    )
    memory_limit: int | None = Field(
        default=None,
        ge=1,
        description="For `auto`: maximum number of stage activations per rank. "
        "Default: as many as it takes.",
    )
    overlap_p2p: bool = Field(
        default=True,
        description="Overlap messages between stages with compute, with receives posted in "
        "advance. With NCCL, each pair of neighbours and direction gets a communicator.",
    )
    overlap_moe: bool = Field(
        default=False,
        description="Overlap dispatch and combine of one microbatch with compute of another. For "
        "the schedules `1f1b`, `interleaved_1f1b`, `dualpipe_v` and `dualpipe`, which then run "
        "forwards in pairs with backwards, with `parallel.ep` > 1 and the dispatchers `alltoall` "
        "and `static`. Results are bitwise equal to those without.",
    )
    pairs: Literal["whole", "split"] = Field(
        default="whole",
        description="Backward passes in the pairs of `overlap_moe`: `split`, for `1f1b` and "
        "`interleaved_1f1b`, computes weight gradients separately, during exchanges of row "
        "gradients, and the remaining ones after the gradient of the input was sent to the "
        "previous rank. Results are bitwise equal.",
    )
    group_size: int | None = Field(
        default=None,
        ge=1,
        description="Microbatches that run through one chunk before the next (interleaved "
        "schedules). Default: the smallest with the shortest step.",
    )
    layout: str | None = Field(
        default=None,
        description="All stages as a text, for uneven ones: `E` embedding, "
        "`t` layer, `m` layer for multi-token prediction, `L` output layer and loss, `|` next "
        "stage, `x*3`, `( )`; as in `Et|(tt|)*2tL`. Default: layers are distributed evenly.",
    )

    _file: ScheduleFile | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check_one_schedule(self) -> Self:
        if self.schedule is not None and self.schedule_file is not None:
            raise ValueError(
                f"schedule_file = {self.schedule_file} replaces schedule = {self.schedule}; leave "
                "one of them out, or set it to none"
            )
        return self

    def with_file(self, file: ScheduleFile | None) -> Self:
        """Return a copy with the content of its ``schedule_file``."""
        copy = self.model_copy()
        copy._file = file
        return copy

    @property
    def file(self) -> ScheduleFile | None:
        """Content of ``schedule_file``, read once in a resolved configuration.

        Raises:
            ConfigError: If the file has to be read and is not a schedule.
        """
        if self.schedule_file is None:
            return None
        return self._file or read_schedule_file(self.schedule_file)

    @property
    def has_read_file(self) -> bool:
        """True if the content of ``schedule_file`` is in memory."""
        return self._file is not None

    @property
    def shown_schedule(self) -> str:
        """Name of the schedule, or path of its file.

        Example:
            >>> PipelineConfig().shown_schedule
            '1f1b'
        """
        return self.schedule_file or self.schedule or DEFAULT_SCHEDULE

    @property
    def schedule_info(self) -> ScheduleInfo | None:
        """Catalog entry of the schedule; ``None`` if it is searched for, or in a file."""
        return None if self.schedule_file is not None else schedule_info(self.shown_schedule)

    @property
    def requested_pairs(self) -> Literal["whole", "split"] | None:
        """Kind of the pairs of forwards and backwards, if the schedule has them only on request."""
        info = self.schedule_info
        if not self.overlap_moe or info is None or not info.takes_pairs:
            return None
        return self.pairs

    @property
    def is_v(self) -> bool:
        """True if the stages go down the ranks and back up, so that one rank holds both ends."""
        if self.file is not None:
            last = self.file.schedule.num_stages - 1
            return all(mine == [rank, last - rank] for rank, mine in enumerate(self.file.stages))
        info = self.schedule_info
        return (self.placement if info is None else info.placement) == "v"

    @property
    def searched_placement(self) -> Literal["loop", "v"] | None:
        """Placement of stages for the search of a schedule; ``None`` for other schedules."""
        return self.placement if self.shown_schedule == SEARCHED else None

    @property
    def copies(self) -> int:
        """Copies of the model in a pipeline: 2 for bidirectional schedules, else 1."""
        info = self.schedule_info
        return 2 if info is not None and info.placement == "bidirectional" else 1

    @property
    def stages_per_rank(self) -> int:
        """Stages per pipeline rank: the chunks of a rank without those of a second copy.

        Example:
            >>> [PipelineConfig(schedule=name).stages_per_rank for name in ("zb_v", "dualpipe")]
            [2, 1]
        """
        return self.chunks // self.copies

    @property
    def chunks(self) -> int:
        """Model chunks per rank, given or derived.

        Example:
            >>> [PipelineConfig(schedule=name).chunks for name in ("1f1b", "zb_v", "looped_bfs")]
            [1, 2, 2]
        """
        if self.num_chunks is not None:
            return self.num_chunks
        if self.file is not None:
            return self.file.schedule.num_chunks
        info = self.schedule_info
        if info is None:
            return 2 if self.is_v else 1
        return info.num_chunks or (1 if info.name == "no_pipelining" else 2)
