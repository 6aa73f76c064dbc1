"""Files of a run's folder that are inputs of a report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from megacore.errors import MegacoreError
from megatrain.files import describe_os_error

T = TypeVar("T")

METRICS_NAME = "metrics.jsonl"
INFO_NAME = "run.json"
TIMELINE_NAME = "timeline.json"
REPORT_NAME = "report.html"


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """One start of a run, first or resumed.

    Attributes:
        first_step: First step of this start, from 1.
        started_at: Time, as readable text.
        layout: Settings of the :class:`~megacore.parallel.Topology`.
        schedule: The pipeline schedule in words.
        resumed_from: The checkpoint from which it continued; ``None`` for a new run.
    """

    first_step: int
    started_at: str
    layout: Mapping[str, Any]
    schedule: str
    resumed_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Predicted and measured memory of the ranks at a pipeline position, bytes.

    Attributes:
        pp_rank: Position on the pipeline axis.
        predicted: Bytes of tensors by kind at the peak.
        measured: Most bytes of a rank; on a CPU, its growth since the start of the run.
    """

    pp_rank: int
    predicted: Mapping[str, float]
    measured: float | None


@dataclass(frozen=True, kw_only=True)
class GeneratedText:
    """A text that the trained model has continued.

    Attributes:
        prompt: Start of the text, from the validation data or the training data.
        text: The continuation.
    """

    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Facts about a run besides its metrics and settings; stored in ``run.json``.

    Attributes:
        name: Name of the run.
        started_at: Start time, as readable text.
        wall_time_s: Wall time in seconds; ``None`` until the run ends.
        layout: Settings of the :class:`~megacore.parallel.Topology`: ``world_size``, ``tp``, ...
        model: The model in words.
        num_parameters: Parameters of the whole model, each counted once.
        data: The training text in words.
        num_tokens: Tokens of the training split.
        unigram_entropy: Entropy of the training split, nats per token; ``None`` if the loss is not
            of tokens.
        schedule: The pipeline schedule in words.
        environment: Versions and hardware, see :func:`collect_environment`.
        resumed_from: The checkpoint from which the run continued.
        config: All settings by section and key, including derived ones.
        prediction: Predicted and measured time and memory, see
            ``megatrain.plan.compare_run.compare_with_prediction``; ``None`` without a calibration.
        derived: Keys, as ``"parallel.etp"``, of settings with a derived value.
        command: The command line of the last start.
        starts: All starts whose steps are in ``metrics.jsonl``, oldest first.
        memory: Memory by pipeline position; empty until the run ends.
        sample: A text of the trained model; ``None`` without one.
    """

    name: str
    started_at: str
    wall_time_s: float | None
    layout: Mapping[str, Any]
    model: str
    num_parameters: int
    data: str
    num_tokens: int
    unigram_entropy: float | None
    schedule: str
    environment: Mapping[str, str] = field(default_factory=dict)
    resumed_from: str | None = None
    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    derived: Sequence[str] = field(default_factory=list)
    prediction: Mapping[str, Any] | None = None
    command: str = ""
    starts: Sequence[RunStart] = field(default_factory=list)
    memory: Sequence[RankMemory] = field(default_factory=list)
    sample: GeneratedText | None = None


@dataclass(frozen=True, kw_only=True)
class TimelineEvent:
    """One action of one rank in one step.

    Attributes:
        rank: Pipeline rank for a predicted event, global rank for a measured one.
        action: Text of the action, e.g. ``"2F0"``.
        start_us: Start in microseconds since the start of the step.
        end_us: End in microseconds.
    """

    rank: int
    action: str
    start_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True)
class RunTimeline:
    """Predicted and measured timeline of one step.

    Attributes:
        step: The measured step, from 1.
        predicted: Events of the simulated schedule, in microseconds like the measured ones.
        measured: Events of the real step, all ranks.
    """

    step: int
    predicted: Sequence[TimelineEvent]
    measured: Sequence[TimelineEvent]


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """All data of a report; missing parts are empty.

    Attributes:
        directory: The run's folder.
        metrics: Records of ``metrics.jsonl``.
        info: Content of ``run.json``.
        timeline: Content of ``timeline.json``.
    """

    directory: Path
    metrics: list[dict[str, Any]]
    info: RunInfo
    timeline: RunTimeline | None


def write_info(directory: str | Path, info: RunInfo) -> None:
    """Write ``run.json``."""
    _write_json(Path(directory) / INFO_NAME, asdict(info))


def write_timeline(directory: str | Path, timeline: RunTimeline) -> None:
    """Write ``timeline.json``."""
    _write_json(Path(directory) / TIMELINE_NAME, asdict(timeline))


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read ``metrics.jsonl``; incomplete lines are skipped.

    Returns:
        The records in file order; an empty list if the file does not exist.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    records = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # the last line of a killed run
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def earlier_starts(directory: str | Path, *, first_step: int) -> list[RunStart]:
    """Return the starts before ``first_step`` in ``run.json``; none if it cannot be read."""
    try:
        starts = _read(RunInfo, Path(directory) / INFO_NAME).starts
    except MegacoreError:
        return []
    return [start for start in starts if start.first_step < first_step]


def read_run(directory: str | Path) -> RunFiles:
    """Read the files of a run.

    Raises:
        MegacoreError: If the folder is not a run or one of its files is invalid.
    """
    directory = Path(directory)
    if not (directory / INFO_NAME).is_file():
        if (directory / METRICS_NAME).is_file():
            raise MegacoreError(
                f"the run in {directory} has no {INFO_NAME}, which it writes with its first step; "
                "train at least one step before the report"
            )
        raise MegacoreError(
            f"{directory} is not the folder of a run: it has no {INFO_NAME}; "
            f"give the folder that `megacore train` names as run.dir"
        )
    info = _read(RunInfo, directory / INFO_NAME)
    return RunFiles(
        directory=directory,
        metrics=read_metrics(directory / METRICS_NAME),
        info=info,
        timeline=_read_timeline(directory / TIMELINE_NAME),
    )


def _read_timeline(path: Path) -> RunTimeline | None:
    return _read(RunTimeline, path) if path.is_file() else None


def _read(kind: type[T], path: Path) -> T:
    """Read a dataclass from a JSON file, with checked types."""
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise MegacoreError(
            f"cannot read {path}: {place + ': ' if place else ''}{first['msg']}; it is damaged or "
            f"of another version of megacore"
        ) from error
    except OSError as error:
        raise MegacoreError(f"cannot read {path}: {describe_os_error(error)}") from error


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
