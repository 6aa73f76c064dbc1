"""The ``[run]`` section: the run's folder, its processes and their supervision."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from megatrain.config.base import MAX_TIMEOUT_S, Section, duration_s


class RunConfig(Section):
    """``[run]``: the run's folder, its processes and their supervision."""

    dir: str = Field(
        default="runs/default",
        min_length=1,
        description="Folder of all files written by the run; its last part is the run's name.",
    )
    nproc: int | None = Field(
        default=None,
        ge=1,
        description="Number of processes (as `--nproc`). Default: one per GPU; without GPUs the "
        "fewest that the layout allows.",
    )
    timeout_s: float = Field(
        default=300.0,
        gt=0.0,
        le=MAX_TIMEOUT_S,
        description="Timeout of a collective operation, and of the wait for ranks that start late, "
        "in seconds; at most a week.",
    )
    peer_timeout_s: float = Field(
        default=20.0,
        ge=1.0,
        le=MAX_TIMEOUT_S,
        description="Seconds without a sign of life after which a rank counts as lost; at most a "
        "week.",
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
    kernels: Literal["auto", "trust", "torch"] = Field(
        default="auto",
        description="Our kernels: `auto` compares each with torch at the first use of a device, "
        "and lets torch compute what differs, crashes or is slower; `trust` takes all without a "
        "trial, `torch` none.",
    )
    torch_operations: list[str] = Field(
        default=[],
        description="Operations that torch computes in any case, by the names that `megacore "
        "doctor --kernels` lists, or their first words, as in `linear.float32`.",
    )
    stop_after: str | None = Field(
        default=None,
        description="Time span after which the run stops early: it finishes its step, saves, and "
        "exits with code 75. Such as `3h50m`, counted from the start of the processes. Default: "
        "no limit.",
    )
    writers: list[Literal["tensorboard", "wandb"]] = Field(
        default=[],
        description="Writers of metrics besides the console and `metrics.jsonl`: `tensorboard`, in "
        "the folder of that name in `run.dir`, and `wandb` (Weights & Biases; `WANDB_MODE=offline` "
        "for files only). Each needs its extra: `pip install megacore[tensorboard]`.",
    )
    calibration: str | None = Field(
        default=None,
        min_length=1,
        description="Calibration of the prediction that `run.json` and the report compare with "
        "the run, and of the peak that MFU is a share of: a device as in `megacore plan --device`, "
        "or a file of `megacore calibrate`. Default: that of the GPU's name; neither on other "
        "devices.",
    )
    plain: bool = Field(
        default=False, description="Print plain lines instead of a live progress bar."
    )

    @property
    def name(self) -> str:
        """Name of the run: the last part of ``dir``.

        Example:
            >>> RunConfig(dir="runs/first").name
            'first'
        """
        return Path(self.dir).absolute().name

    @field_validator("stop_after")
    @classmethod
    def _check_duration(cls, text: str | None) -> str | None:
        if text is not None:
            duration_s(text)
        return text

    @field_validator("dir")
    @classmethod
    def _check_dir(cls, folder: str) -> str:
        if not folder.isprintable():
            raise ValueError("must not contain control characters")
        return folder
