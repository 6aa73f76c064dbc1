"""The table of step metrics, and ``metrics.jsonl`` with one JSON object per step."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatrain.report import read_metrics
from megatrain.train.meters import ExpertMetrics


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One line of the table of metrics.

    Attributes:
        name: Name in ``metrics.jsonl``.
        group: First part of its name in TensorBoard and Weights & Biases.
        text: Meaning.
        unit: Unit; empty for a plain number.
        megatron: Name in Megatron-LM; empty without one.
        torchtitan: Name in torchtitan; empty without one.
        console: Format in a line of the console; empty to omit it there.
    """

    name: str
    group: str
    text: str
    unit: str = ""
    megatron: str = ""
    torchtitan: str = ""
    console: str = ""


def _metric(group: str, text: str, **options: Any) -> Any:
    """Declare a field of :class:`StepRecord` with its line of the table."""
    defaults = {key: options.pop(key) for key in ("default", "default_factory") if key in options}
    # The name is that of the field.
    return field(
        metadata={"metric": Metric(name="", group=group, text=text, **options)}, **defaults
    )


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Metrics of one step; ``None`` and empty tables for those that were not measured.

    Attributes:
        step: Number of the step, from 1, which is the number of finished steps after it.
        experts: Metrics of MoE layers; ``None`` for a dense model.
        with_load: Whether to include the load of every expert.

    The other fields are described by their line in the table, :data:`METRICS`.
    """

    step: int
    loss: float | None = _metric(
        "train",
        "training loss averaged over the global batch; none without a label that counts",
        unit="nats/token",
        megatron="lm loss",
        torchtitan="loss_metrics/global_avg_loss",
        console="loss {:.4f}",
    )
    lr: float = _metric(
        "train",
        "learning rate",
        megatron="learning-rate",
        torchtitan="lr/AdamW",
        console="lr {:.2e}",
    )
    grad_norm: float | None = _metric(
        "train",
        "norm of the averaged gradient before clipping; none without a label that counts",
        megatron="grad-norm",
        torchtitan="grad_norm",
        console="grad {:.2f}",
    )
    num_zeros_in_grad: int | None = _metric(
        "train",
        "zeros in the gradient of the step, with `debug.count_zeros`",
        megatron="num-zeros",
        default=None,
    )
    param_norm: float | None = _metric(
        "train",
        "norm of all trained weights before the update, every 10 steps",
        megatron="params-norm",
        default=None,
    )
    num_skipped: int = _metric(
        "train",
        "steps skipped so far because of a non-finite gradient",
        unit="steps",
        megatron="skipped iterations",
    )
    samples: int = _metric(
        "train",
        "samples consumed so far, this step included",
        unit="samples",
        megatron="consumed samples",
    )
    epochs: Mapping[str, float] = _metric(
        "train",
        "passes over each training source so far; of more than 16, as `expert_load`",
        default_factory=dict,
    )
    mtp_losses: tuple[float, ...] = _metric(
        "train",
        "loss of each depth of multi-token prediction",
        unit="nats/token",
        megatron="mtp_1 loss",
        default=(),
    )
    groups: Mapping[str, float] = _metric(
        "train",
        "metrics of a loss of groups, such as `rewards/margins` of pairs",
        default_factory=dict,
    )
    validation_loss: float | None = _metric(
        "validation",
        "loss on validation data after the step, averaged over several sets by weight",
        unit="nats/token",
        megatron="lm loss validation",
        torchtitan="validation_metrics/loss",
        default=None,
    )
    validation_losses: Mapping[str, float] = _metric(
        "validation",
        "the same for each of several sets",
        unit="nats/token",
        default_factory=dict,
    )
    validation_groups: Mapping[str, Mapping[str, float]] = _metric(
        "validation", "metrics of a loss of groups, of each set", default_factory=dict
    )
    step_time_s: float = _metric(
        "speed",
        "time of the step without validation and checkpoints",
        unit="s",
        megatron="iteration-time",
        torchtitan="time_metrics/end_to_end(s)",
    )
    tokens_per_s: float = _metric(
        "speed",
        "tokens of the global batch over the step time",
        unit="tokens/s",
        console="{:,.0f} tok/s",
    )
    tokens_per_s_per_device: float | None = _metric(
        "speed",
        "the same over the number of ranks",
        unit="tokens/s",
        torchtitan="throughput(tps)",
        default=None,
    )
    tflops_per_device: float | None = _metric(
        "speed",
        "operations of the model over step time and ranks",
        unit="TFLOP/s",
        megatron="throughput",
        torchtitan="tflops",
        default=None,
    )
    mfu: float | None = _metric(
        "speed",
        "share of the peak of the device, if it is known",
        torchtitan="mfu(%)",
        console="MFU {:.1%}",
        default=None,
    )
    hfu: float | None = _metric(
        "speed", "the same with recomputed operations, if there are any", default=None
    )
    slowest_rank: int | None = _metric(
        "speed", "rank that waited least for others in the last 10 steps", default=None
    )
    slowest_rank_ratio: float | None = _metric(
        "speed", "its time without waits over the mean of all ranks", default=None
    )
    time_data_s: float | None = _metric(
        "time", "batches", unit="s", torchtitan="time_metrics/data_loading(s)", default=None
    )
    time_forward_backward_s: float | None = _metric(
        "time", "passes without waits for pipeline messages", unit="s", default=None
    )
    time_pipeline_wait_s: float | None = _metric(
        "time", "waits for pipeline messages", unit="s", default=None
    )
    time_all_to_all_s: float | None = _metric(
        "time",
        "waits of passes for tokens of experts on other ranks, on CPUs",
        unit="s",
        default=None,
    )
    time_grad_reduce_s: float | None = _metric(
        "time",
        "reduction of gradients and their norm, as far as no pass hides it",
        unit="s",
        default=None,
    )
    time_optimizer_s: float | None = _metric(
        "time", "update of the weights", unit="s", default=None
    )
    time_param_gather_s: float | None = _metric(
        "time", "gather of updated weights, as far as no pass hides it", unit="s", default=None
    )
    time_checkpoint_s: float | None = _metric(
        "time", "saving after the step before, as far as it blocks", unit="s", default=None
    )
    memory_allocated_bytes: int | None = _metric(
        "memory",
        "allocated tensors",
        unit="bytes",
        megatron="mem-allocated-bytes",
        default=None,
    )
    memory_reserved_bytes: int | None = _metric(
        "memory",
        "reserved by torch",
        unit="bytes",
        megatron="mem-reserved-bytes",
        torchtitan="memory/max_reserved(GiB)",
        default=None,
    )
    memory_resident_bytes: int | None = _metric(
        "memory", "resident memory of a process on the CPU", unit="bytes", default=None
    )
    memory_shared_bytes: int | None = _metric(
        "memory", "its part that other processes can share", unit="bytes", default=None
    )
    memory_peak_bytes: int | None = _metric(
        "memory",
        "most allocated (CPU: resident) since the start",
        unit="bytes",
        megatron="mem-max-allocated-bytes",
        torchtitan="memory/max_active(GiB)",
        default=None,
    )
    experts: ExpertMetrics | None = None
    with_load: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Return the measured metrics by name, with those of MoE layers."""
        data = {name: getattr(self, name) for name in _NAMES}
        if self.experts is not None:
            data |= self.experts.as_record(with_load=self.with_load)
        return {name: value for name, value in data.items() if value not in (None, {}, ())}

    def to_json(self) -> str:
        """Format as one line. A non-finite value becomes ``null``, since JSON has no NaN."""
        return json.dumps(finite(self.as_dict()), allow_nan=False)

    def scalars(self) -> dict[str, float]:
        """Return the finite numbers by ``group/name``; of a table, by ``group/name/key``.

        Lists, such as the load of every expert, are left out.
        """
        found: dict[str, float] = {}
        for name, value in self.as_dict().items():
            if name in METRICS:
                _flatten(f"{METRICS[name].group}/{name}", value, found)
        return found

    def console_texts(self) -> list[str]:
        """Format the metrics of a line of the console."""
        values = ((metric.console, getattr(self, name, None)) for name, metric in METRICS.items())
        found = [text.format(value) for text, value in values if text and value is not None]
        shown = {"rewards/accuracies": "accuracy", "rewards/margins": "margin"}
        of_groups = [
            f"{shown[name]} {value:.3f}" for name, value in self.groups.items() if name in shown
        ]
        return found[:1] + of_groups + found[1:]


_EXPERT_METRICS = (
    Metric(name="expert_load", group="moe", text="copies of tokens of each expert, by layer"),
    Metric(name="expert_imbalance", group="moe", text="highest load over the mean, worst layer"),
    Metric(name="num_dropped_copies", group="moe", text="dropped copies of tokens"),
    Metric(name="num_over_budget", group="moe", text="those that found a buffer full"),
    Metric(name="num_reruns", group="moe", text="reruns of the step with larger buffers"),
    Metric(
        name="aux_loss",
        group="moe",
        text="load-balancing loss, with its coefficient",
        megatron="load_balancing_loss",
    ),
    Metric(name="z_loss", group="moe", text="z-loss, with its coefficient", megatron="z_loss"),
    Metric(name="echo", group="moe", text="counters of clones, by layer"),
)
# The table of all metrics by name, in the order of a record.
METRICS: Mapping[str, Metric] = {
    item.name: replace(item.metadata["metric"], name=item.name)
    for item in fields(StepRecord)
    if "metric" in item.metadata
} | {metric.name: metric for metric in _EXPERT_METRICS}

_NAMES = [item.name for item in fields(StepRecord) if item.name not in ("experts", "with_load")]


def finite(value: Any) -> Any:
    """Replace non-finite numbers, which JSON does not have, inside of tables and lists too."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flatten(name: str, value: Any, found: dict[str, float]) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _flatten(f"{name}/{key}", item, found)
    elif isinstance(value, tuple):
        _flatten(name, dict(enumerate(value, start=1)), found)
    elif isinstance(value, int | float) and math.isfinite(value):
        found[name] = value


class MetricsWriter:
    """Append-only writer of a metrics file, for rank 0 only.

    A new run starts an empty file. A resumed run keeps the records of the first ``resume_step``
    steps and removes the rest (steps after the checkpoint, or a line truncated by a crash), so each
    step occurs once.

    Args:
        path: The file; its folder is created.
        resume_step: Finished steps; 0 for a new run.
    """

    def __init__(self, path: str | Path, *, resume_step: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _keep_first(self.path, resume_step)
        # Unbuffered: what could not be written must not be tried again with the next record.
        self._file = self.path.open("ab", buffering=0)

    def write(self, record: StepRecord) -> None:
        """Append one record at once.

        Raises:
            OSError: If it cannot be written; the file is then as before.
        """
        line = (record.to_json() + "\n").encode()
        size = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _keep_first(path: Path, step: int) -> None:
    """Rewrite the file so that it holds the records of the first ``step`` steps only."""
    kept = {record["step"]: record for record in read_metrics(path) if record["step"] <= step}
    lines = [json.dumps(kept[number]) + "\n" for number in sorted(kept)]
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(path)
