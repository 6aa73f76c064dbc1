"""The ``[debug]`` section: diagnosis, comparison and benchmarks."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from megatrain.config.base import Section

# The passes over more sources are recorded at `load_interval`: 1,000 take 15 KB per step.
FEW_SOURCES = 16


class DebugConfig(Section):
    """``[debug]``: diagnosis, comparison and benchmarks; no run needs to set any of it."""

    trace_step: int | None = Field(
        default=None,
        ge=-1,
        description="Step whose timeline is recorded, at most `train.steps`; -1 for none. "
        "Default: `train.steps` / 2.",
    )
    profile_steps: str | None = Field(
        default=None,
        description="Steps that torch's profiler records on every rank, such as "
        "`100-103`; files in `<run.dir>/profile`, see `megacore trace merge`. Default: none.",
    )
    load_interval: int = Field(
        default=10,
        ge=0,
        description="Steps between two records of every expert's load in `metrics.jsonl`, and of "
        "the passes over more than 16 sources; 0 for none. Imbalance and losses are recorded in "
        "each step.",
    )
    record_routing: str | None = Field(
        default=None,
        min_length=1,
        description="Folder for the chosen experts of each token in each training step. Default: "
        "they are not recorded.",
    )
    replay_routing: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of such a recording: training dispatches tokens to the recorded "
        "experts, in any layout. Default: the router decides.",
    )
    force_balanced: bool = Field(
        default=False,
        description="Give all experts the same number of tokens, regardless of scores; for "
        "benchmarks.",
    )
    count_zeros: bool = Field(
        default=False,
        description="Count the zeros in the gradient of each step, the metric "
        "`num_zeros_in_grad`; one more pass over the reduced gradients.",
    )
    check_messages: bool = Field(
        default=False,
        description="Send a header before each message between stages, and stop with both names "
        "if a message is not the expected one. Slower.",
    )

    @property
    def profiled(self) -> range:
        """Indices, from 0, of the steps of ``profile_steps``, which count from 1.

        Example:
            >>> DebugConfig(profile_steps="100-103").profiled
            range(99, 103)
        """
        if self.profile_steps is None:
            return range(0)
        first, _, last = self.profile_steps.partition("-")
        return range(int(first) - 1, int(last or first))

    @field_validator("profile_steps")
    @classmethod
    def _check_profile(cls, steps: str | None) -> str | None:
        if steps is not None and re.fullmatch(r"\d{1,9}(-\d{1,9})?", steps) is None:
            raise ValueError("must be one step or a range of steps, as in 100-103")
        return steps

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.replay_routing is not None and self.replay_routing == self.record_routing:
            raise ValueError(
                f"record_routing and replay_routing both name {self.replay_routing}; record into "
                "another folder"
            )
        if self.replay_routing is not None and self.force_balanced:
            raise ValueError(
                "replay_routing and force_balanced both decide where tokens go; leave one out"
            )
        return self
