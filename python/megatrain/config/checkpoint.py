"""The ``[checkpoint]`` section: location, interval and initial checkpoint."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from megatrain.config.base import Section, duration_s


class CheckpointConfig(Section):
    """``[checkpoint]``: location, interval and initial checkpoint."""

    dir: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of checkpoints. Default: `<run.dir>/checkpoints`.",
    )
    interval: int | None = Field(
        default=None,
        ge=-1,
        description="Steps between checkpoints; 0 saves only at the end, -1 never. Default: "
        "`interval_time` decides.",
    )
    interval_time: str = Field(
        default="30m",
        description="Time span between checkpoints, such as `30m` or `2h`, unless `interval` is "
        "set.",
    )
    keep: int = Field(default=2, ge=1, description="Number of newest checkpoints that are kept.")
    in_background: bool | Literal["auto"] = Field(
        default="auto",
        alias="async",
        description="Copy the state to host memory and continue training while it is written; "
        "`auto` does so where a rank writes more than 1 GiB and the copies of a host's ranks take "
        "at most half of its available memory.",
    )
    on_failure: Literal["stop", "continue"] = Field(
        default="stop",
        description="Reaction to a checkpoint, metrics or a report that cannot be written, such as "
        "on a full disk; `continue` notes it and tries again with the next one.",
    )
    resume: str | None = Field(
        default=None,
        min_length=1,
        description="`auto` continues from the newest checkpoint if there is one; a path continues "
        "from that checkpoint. Default: `auto` if SLURM or torchrun has restarted the run, else "
        "start anew.",
    )
    load_weights: str | None = Field(
        default=None,
        min_length=1,
        description="Hugging Face folder or checkpoint whose weights a fresh start uses: step 0, "
        "new optimizer state. Ignored if `resume` finds a checkpoint. Default: random weights.",
    )

    @property
    def saves(self) -> bool:
        """True if there are checkpoints at all."""
        return self.interval != -1

    @property
    def interval_steps(self) -> int:
        """Steps between checkpoints; 0 if their number does not decide.

        Example:
            >>> CheckpointConfig(interval=100).interval_steps, CheckpointConfig().interval_steps
            (100, 0)
        """
        return max(0, self.interval or 0)

    @property
    def interval_s(self) -> float:
        """Seconds between checkpoints; 0 if the time does not decide.

        Example:
            >>> CheckpointConfig(interval=100).interval_s, CheckpointConfig().interval_s
            (0.0, 1800.0)
        """
        return duration_s(self.interval_time) if self.interval is None else 0.0

    @field_validator("in_background", mode="before")
    @classmethod
    def _check_background(cls, value: object) -> object:
        if isinstance(value, bool) or value in ("auto", "true", "false"):
            return value
        raise ValueError('expected true, false or "auto"')

    @field_validator("interval_time")
    @classmethod
    def _check_duration(cls, text: str) -> str:
        duration_s(text)
        return text
