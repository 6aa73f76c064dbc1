"""Step metrics in ``metrics.jsonl``: one JSON object per step, flushed at once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from megacore.report import read_metrics
from megacore.train.meters import ExpertMetrics


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Metrics of one step in ``metrics.jsonl``.

    Attributes:
        step: Number of the step, from 0.
        loss: Training loss averaged over the global batch, nats per token.
        grad_norm: Norm of the averaged gradient before clipping.
        lr: Learning rate of the step.
        tokens_per_s: Tokens of the global batch divided by the step time.
        step_time_s: Wall time of the step in seconds, without validation and checkpoints.
        num_skipped: Steps skipped so far because of a non-finite gradient.
        samples: Samples consumed so far, this step included.
        validation_loss: Loss on validation data after the step, averaged over several sets by their
            weights; ``None`` where it was not measured.
        validation_losses: Loss of each validation set, by name; empty if there is only one.
        epochs: Passes over each training source so far, by name.
        experts: Metrics of MoE layers; ``None`` for a dense model.
        mtp_losses: Mean loss of each depth of multi-token prediction, nats per predicted token.
        with_load: Whether to include the load of every expert.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    step_time_s: float
    num_skipped: int
    samples: int
    validation_loss: float | None = None
    validation_losses: Mapping[str, float] = field(default_factory=dict)
    epochs: Mapping[str, float] = field(default_factory=dict)
    experts: ExpertMetrics | None = None
    mtp_losses: tuple[float, ...] = ()
    with_load: bool = True

    def to_json(self) -> str:
        """Format as one line. A non-finite value becomes ``null``, since JSON has no NaN.

        An unmeasured ``validation_loss`` and empty tables and lists are omitted. ``experts``
        becomes ``expert_load`` (a list per MoE layer, by its index), ``expert_imbalance``,
        ``num_dropped_copies``, ``num_over_budget``, ``num_reruns``, ``aux_loss``, ``z_loss`` and,
        with clones, ``echo``.
        """
        data = asdict(self)
        del data["experts"], data["with_load"]
        if self.experts is not None:
            data |= self.experts.as_record(with_load=self.with_load)
        if self.validation_loss is None:
            del data["validation_loss"]
        for name in ("validation_losses", "epochs"):
            data[name] = {
                key: value if math.isfinite(value) else None for key, value in data[name].items()
            }
            if not data[name]:
                del data[name]
        data["mtp_losses"] = [x if math.isfinite(x) else None for x in self.mtp_losses]
        if not self.mtp_losses:
            del data["mtp_losses"]
        for name, value in data.items():
            if isinstance(value, float) and not math.isfinite(value):
                data[name] = None
        return json.dumps(data, allow_nan=False)


class MetricsWriter:
    """Append-only writer of a metrics file, for rank 0 only.

    A new run starts an empty file. A resumed run keeps the records of the steps before
    ``resume_step`` and removes the rest (steps after the checkpoint, or a line truncated by a
    crash), so each step occurs once.

    Args:
        path: The file; its folder is created.
        resume_step: The first step that will be written; 0 for a new run.
    """

    def __init__(self, path: str | Path, *, resume_step: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _keep_before(self.path, resume_step)
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        """Append one record and flush the file."""
        self._file.write(record.to_json() + "\n")
        self._file.flush()

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


def _keep_before(path: Path, step: int) -> None:
    """Rewrite the file so that it holds the records of steps before ``step`` only."""
    kept = {record["step"]: record for record in read_metrics(path) if record["step"] < step}
    lines = [json.dumps(kept[number]) + "\n" for number in sorted(kept)]
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(path)
