"""The ``[debug]`` section: diagnosis, comparison and benchmarks."""

from __future__ import annotations

import math
import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from megatrain.config.base import MAX_TIMEOUT_S, Section


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
        description="Steps between two records of every expert's load in `metrics.jsonl`; 0 for "
        "none. Imbalance and losses are recorded in each step.",
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
    router_fp32: bool = Field(
        default=True,
        description="Compute router logits in float32, regardless of `train.dtype`.",
    )
    drop_by: Literal["probs", "position"] = Field(
        default="probs",
        description="Copies that are kept under `capacity_factor`: those of the highest weight, "
        "or the first ones.",
    )
    static_transport: Literal["auto", "collective", "peer"] = Field(
        default="auto",
        description='Transport of rows with `moe.dispatcher = "static"`: equal-split all-to-alls '
        "or direct writes to peer memory. Default: `peer` where all ranks of the group can access "
        "each other's memory.",
    )
    graph_backend: Literal["auto", "cuda", "emulated", "transformer_engine"] = Field(
        default="auto",
        description="`cuda` for real graphs; `emulated` runs the captured code again, on any "
        "device, and checks that a real graph would do the same; `transformer_engine` delegates "
        "captures of parts to that package. `auto`: `cuda` or `emulated`, by the device.",
    )
    graph_warmup_steps: int = Field(
        default=3,
        ge=1,
        description="Steps without graphs, after a start or a resume, before the capture.",
    )
    max_skipped_steps: int = Field(
        default=20,
        ge=0,
        description="Steps in a row whose update is skipped because of a non-finite gradient, "
        "after which the run ends with exit code 1; 0 for no limit.",
    )
    loss_scale: float = Field(
        default=65536.0,
        ge=1.0,
        description="Initial loss scale of float16 training, adapted later: the factor on the mean "
        "loss of a step. A power of two.",
    )
    loss_scale_interval: int = Field(
        default=1000,
        ge=1,
        description="Steps without overflow after which the loss scale doubles.",
    )
    bucket_numel: int | None = Field(
        default=None,
        ge=1,
        description="Elements per gradient bucket. Default: chosen from the data parallel size.",
    )
    pad_for_ring: bool = Field(
        default=False,
        description="Pad gradient buckets to multiples of 2^16 elements, which can be faster in "
        "rings of many ranks.",
    )
    average_in_collective: bool = Field(
        default=True,
        description="Average gradients by a division after the sum; `false` scales them before "
        "the sum.",
    )
    check_messages: bool = Field(
        default=False,
        description="Send a header before each message between stages, and stop with both names "
        "if a message is not the expected one. Slower.",
    )
    backend: Literal["gloo", "nccl"] | None = Field(
        default=None,
        description="Communication library. Default: `nccl` with a GPU, else `gloo`.",
    )
    host_memory: bool = Field(
        default=True,
        description="Exchange tensors of `gloo` groups whose ranks share a host through shared "
        "memory.",
    )
    peer_timeout_s: float = Field(
        default=20.0,
        ge=1.0,
        le=MAX_TIMEOUT_S,
        description="Seconds without a sign of life after which a rank counts as lost; at most a "
        "week.",
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

    @field_validator("loss_scale")
    @classmethod
    def _check_loss_scale(cls, scale: float) -> float:
        if math.frexp(scale)[0] != 0.5:
            lower = 2.0 ** math.floor(math.log2(scale))
            raise ValueError(
                f"loss_scale = {scale:g} is no power of two, so it would change bits; "
                f"nearest: {lower:g}, {2 * lower:g}"
            )
        return scale

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
