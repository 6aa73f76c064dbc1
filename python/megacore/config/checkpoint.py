"""The ``[checkpoint]`` section: location, interval and initial checkpoint."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from megacore.config.base import Section, duration_s


class CheckpointConfig(Section):
    """``[checkpoint]``: location, interval and initial checkpoint."""

    dir: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of checkpoints. Default: `<run.dir>/checkpoints`.",
    )
    interval: int = Field(
        default=0,
        ge=-1,
        description="Steps between checkpoints; 0 saves by `interval_time` and at the end, -1 "
        "never.",
    )
    interval_time: str = Field(
        default="30m",
        description="Time between checkpoints if `interval` is 0, such as `30m` or `2h`; `0` saves "
        "only at the end.",
    )
    keep: int = Field(default=2, ge=1, description="Number of newest checkpoints that are kept.")
    in_background: bool = Field(
        default=False,
        alias="async",
        description="Copy the state to host memory and continue training while it is written.",
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

    @field_validator("interval_time")
    @classmethod
    def _check_duration(cls, text: str) -> str:
        duration_s(text)
        return text
