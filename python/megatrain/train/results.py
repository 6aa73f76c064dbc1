"""Results of a finished run: the timeline of one step and the report."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from megacore.errors import MegacoreError
from megacore.parallel import Topology
from megacore.parallel.collectives import gather_objects
from megacore.pipeline import Action, ActionKind, ActionRecorder, Schedule, TimedAction
from megacore.pipeline.prediction import mean_times, predict
from megatrain.config import ResolvedConfig
from megatrain.config.resolved import ResolvedCheckpointConfig
from megatrain.data import TrainingData
from megatrain.generation.decoding import Sampling, stream
from megatrain.generation.restore import restore_model
from megatrain.plan.compare_run import compare_with_prediction, predicted_tensors
from megatrain.report import (
    GeneratedText,
    RankMemory,
    RunInfo,
    RunStart,
    RunTimeline,
    TimelineEvent,
    collect_environment,
    earlier_starts,
    write_report,
    write_timeline,
)
from megatrain.train.kernels import kernel_environment
from megatrain.train.memory import memory_bytes
from megatrain.train.trainer import Trainer
from megatrain.train.watch import calibration_name
from megatrain.view import measured_trace

TRACE_NAME = "trace.json"
# Passes of a trace of all ranks. Each has about three events, and an event 760 bytes and 126 us.
MOST_TRACED_ACTIONS = 20_000
# Loading and generating takes a second for this many parameters on one core.
_SAMPLED_PARAMS = 20_000_000
_PROMPT_TOKENS, _NEW_TOKENS = 32, 200


def write_results(
    trainer: Trainer,
    recorder: ActionRecorder | None,
    *,
    step: int,
    info: RunInfo,
    step_times_s: Sequence[float],
    finished: bool,
) -> dict[str, Path]:
    """Write ``run.json``, ``report.html`` and the timeline and trace of the recorded step, if any.

    Collective: rank 0 gathers recorded events, and writes.

    Args:
        trainer: Training components of this rank.
        recorder: The recorded step; ``None`` on every rank if no step was recorded.
        step: Number of the recorded step.
        info: Contents of the report.
        step_times_s: Times of all steps of this run.
        finished: Whether all steps were run; a run that must stop generates no text.

    Returns:
        Files by display name; empty on all ranks but 0.
    """
    directory = Path(trainer.config.run.dir)
    recorded, pipelines = _gather_events(trainer, recorder)
    peaks = gather_objects(_peak_bytes(trainer.device, trainer.first_bytes), trainer.groups.world)
    if trainer.groups.rank != 0:
        return {}
    events = [event for events in recorded for event in events]
    if events:
        write_timeline(directory, make_timeline(trainer.schedule, events, step=step))
        trace = measured_trace(trainer.schedule, events, pipelines=pipelines)
        (directory / TRACE_NAME).write_text(json.dumps(trace))
    # Larger models would delay the end of the run.
    is_small = trainer.num_params <= _SAMPLED_PARAMS and trainer.config.model.factory is None
    samples = finished and is_small and trainer.config.checkpoint.saves
    info = replace(
        info,
        prediction=_prediction(trainer, recorded, peaks, step_times_s),
        memory=_memory(trainer.config, trainer.groups.topology, peaks),
        sample=_sample(trainer.config.checkpoint, trainer.data) if samples else None,
    )
    return {
        "report": write_report(directory, info=info),
        "metrics": directory / "metrics.jsonl",
    }


def _gather_events(
    trainer: Trainer, recorder: ActionRecorder | None
) -> tuple[list[list[TimedAction]], list[list[int]]]:
    """Gather recorded events on rank 0, with the ranks of the pipelines that they are from.

    Where all ranks have more actions than a trace should hold, only the pipeline of rank 0 is
    gathered: the others would wait for minutes while it is written.
    """
    groups, schedule = trainer.groups, trainer.schedule
    pipelines: list[list[int]] = groups.topology.dense.groups("pp").tolist()
    of_pipeline = sum(len(schedule.actions(rank)) for rank in range(schedule.num_ranks))
    is_small = of_pipeline * len(pipelines) <= MOST_TRACED_ACTIONS
    events = recorder.events() if recorder else []
    gathered = gather_objects(events, groups.world if is_small else groups.pp)
    return gathered, pipelines if is_small else [list(groups.pp.ranks)]


def _peak_bytes(device: torch.device, first: float) -> float:
    """Return the most bytes allocated; on a CPU, the growth of resident memory at its peak."""
    return memory_bytes(device)[2] - first


def _memory(config: ResolvedConfig, topology: Topology, peaks: Sequence[float]) -> list[RankMemory]:
    """Join the predicted tensors of each pipeline position with its largest measured peak."""
    if config.model.factory is not None:
        return []
    measured: defaultdict[int, float] = defaultdict(float)
    for pipeline in topology.dense.groups("pp").tolist():
        for position, rank in enumerate(pipeline):
            measured[position] = max(measured[position], peaks[rank])
    return [
        RankMemory(pp_rank=pp_rank, predicted=parts, measured=measured[pp_rank])
        for pp_rank, parts in enumerate(predicted_tensors(config, topology.world_size))
    ]


def _sample(checkpoint: ResolvedCheckpointConfig, data: TrainingData) -> GeneratedText | None:
    """Continue a validation text with the last checkpoint; one process does so in any layout."""
    try:
        restored = restore_model(checkpoint.dir)
        sets = list(data.validation.values()) or [data.train]
        length = min(_PROMPT_TOKENS, restored.config.model.seq_length // 2)
        prompt = sets[0].sample(0).tokens[:length].tolist()
        tokens = stream(restored.model, [prompt], Sampling(temperature=0.7, seed=0))
        found = (step[0] for step in islice(tokens, _NEW_TOKENS))
        # A text has ended at the first None.
        new = [token for token in iter(lambda: next(found, None), None)]
    except MegacoreError:  # without a finished checkpoint
        return None
    decode = restored.tokenizer.decode
    start = decode(prompt)
    return GeneratedText(prompt=start, text=decode([*prompt, *new])[len(start) :])


def _prediction(
    trainer: Trainer,
    recorded: Sequence[Sequence[TimedAction]],
    peaks: Sequence[float],
    step_times_s: Sequence[float],
) -> dict[str, Any] | None:
    """Compare the run with the prediction of its calibration, if there is one."""
    config = trainer.config
    calibration = calibration_name(config.run.calibration, trainer.device)
    if calibration is None or not step_times_s or config.model.factory is not None:
        return None
    passes = [
        sum(
            event.end_us - event.start_us
            for event in events
            if Action.parse(event.action).kind in _PASSES
        )
        for events in recorded
        if events
    ]
    return compare_with_prediction(
        config,
        trainer.groups.topology.world_size,
        calibration=calibration,
        step_times_s=step_times_s,
        passes_s=statistics.fmean(passes) / 1e6 if passes else None,
        memory_bytes=max(peaks) if trainer.device.type == "cuda" else None,
    )


_PASSES = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
    ActionKind.RECOMPUTE,
)


def make_timeline(schedule: Schedule, events: Sequence[TimedAction], *, step: int) -> RunTimeline:
    """Build a timeline of a measured step and the simulation of its schedule.

    The simulation uses, for each stage, the mean measured time of its F, B, I and W. Differences
    are therefore effects outside the schedule: transfers, contention for cores, variation between
    passes.

    Args:
        schedule: The schedule that ran.
        events: Recorded events of all ranks, in microseconds of one clock.
        step: Number of the step, from 1.
    """
    events = _one_after_another(schedule, events)
    start = min(event.start_us for event in events)
    measured = [
        TimelineEvent(
            rank=event.rank,
            action=event.action,
            start_us=event.start_us - start,
            end_us=event.end_us - start,
        )
        for event in events
    ]
    predicted = [
        TimelineEvent(
            rank=event.rank, action=str(event.action), start_us=event.start, end_us=event.end
        )
        for event in predict(schedule, mean_times(events))
    ]
    return RunTimeline(step=step, predicted=predicted, measured=measured)


def _one_after_another(schedule: Schedule, events: Sequence[TimedAction]) -> list[TimedAction]:
    """Split the time of every interleaved pair in two sequential parts, as a simulation does."""
    seconds: dict[str, str] = {}
    for rank in range(schedule.num_ranks):
        actions = [str(action) for action in schedule.actions(rank)]
        seconds |= {actions[at]: actions[at + 1] for at in schedule.overlaps(rank)}
    found = {(event.rank, event.action): event for event in events}
    for event in events:
        partner = found.get((event.rank, seconds.get(event.action, "")))
        if partner is None or partner.start_us >= event.end_us:
            continue
        start, end = event.start_us, max(event.end_us, partner.end_us)
        lengths = [one.end_us - one.start_us for one in (event, partner)]
        cut = start + (end - start) * lengths[0] / sum(lengths)
        found[event.rank, event.action] = event._replace(start_us=start, end_us=cut)
        found[event.rank, partner.action] = partner._replace(start_us=cut, end_us=end)
    return list(found.values())


def run_info(
    trainer: Trainer,
    *,
    started_at: datetime,
    wall_time_s: float | None,
    resumed_from: Path | None,
    first_step: int,
) -> RunInfo:
    """Collect the description of the run for the report.

    ``wall_time_s`` is ``None`` for a run that has not ended; ``first_step`` steps were finished
    before this start.
    """
    config, data, topology = trainer.config, trainer.data, trainer.groups.topology
    sizes = ("world_size", "tp", "cp", "pp", "ep", "etp", "order")
    start = RunStart(
        first_step=first_step + 1,
        started_at=started_at.strftime("%Y-%m-%d %H:%M"),
        layout={name: getattr(topology, name) for name in sizes},
        schedule=trainer.schedule_text(),
        resumed_from=None if resumed_from is None else str(resumed_from),
    )
    return RunInfo(
        name=config.run.name,
        started_at=start.started_at,
        wall_time_s=wall_time_s,
        layout=start.layout,
        model=trainer.model_text(),
        num_parameters=trainer.num_params,
        data=trainer.data_text(),
        num_tokens=data.train.num_tokens,
        unigram_entropy=data.unigram_entropy,
        schedule=start.schedule,
        environment=collect_environment()
        | kernel_environment(
            config.train,
            trainer.chunks,
            backend=config.run.backend,
            device=trainer.device,
            choice=trainer.kernels,
        ),
        resumed_from=start.resumed_from,
        config=config.model_dump(mode="json", exclude_none=True),
        derived=sorted(config.derived),
        command=shlex.join(("megacore", *sys.argv[1:])),
        starts=[*earlier_starts(config.run.dir, first_step=start.first_step), start],
    )
