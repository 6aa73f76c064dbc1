"""Pipeline rules: settings of each schedule, and the layers of its stages."""

from __future__ import annotations

from collections.abc import Callable

from megacore._core import ScheduleInfo, schedule_catalog
from megatrain.config.layers import (
    layers_fit,
    layers_of_stages,
    mtp_stage,
    nearest_fits,
    stages_of_ranks,
)
from megatrain.config.problems import ConfigErrors
from megatrain.config.resolved import ResolvedConfig
from megatrain.config.schedule_file import ScheduleFile


def check_pipeline(problems: ConfigErrors, config: ResolvedConfig) -> None:
    """Add the violated rules of the ``[pipeline]`` section."""
    _check_options(problems, config)
    if (file := config.pipeline.file) is not None:
        if not _check_file(problems, config, file):
            return  # the stages are not known
    else:
        _check_chunks(problems, config)
    if config.pipeline.overlap_moe:
        _check_overlap_moe(problems, config)
    if _own_chunks(config) in (0, config.pipeline.chunks):  # else the stages are not known
        _check_layers(problems, config)


def _own_chunks(config: ResolvedConfig) -> int:
    """Return the fixed number of chunks per rank of the schedule; 0 if any number is allowed."""
    if config.pipeline.file is not None:
        return config.pipeline.file.schedule.num_chunks
    info = config.pipeline.schedule_info
    return info.num_chunks if info is not None else 2 * config.pipeline.is_v


def _check_chunks(problems: ConfigErrors, config: ResolvedConfig) -> None:
    pipeline, pp = config.pipeline, config.parallel.pp
    schedule = problems.shown("pipeline.schedule")
    chunks = problems.shown("pipeline.num_chunks")
    own_chunks = _own_chunks(config)
    if own_chunks and pipeline.chunks != own_chunks:
        problems.add(
            f"{chunks} does not fit {schedule}, which has {own_chunks}; leave num_chunks out, or "
            f"use one of {_names(lambda other: other.num_chunks == 0)}"
        )
    elif pipeline.shown_schedule == "no_pipelining":
        if pp > 1:
            problems.add(
                f"{schedule} runs on one pipeline rank, but {problems.shown('parallel.pp')}; set "
                "parallel.pp to 1, or use 1f1b"
            )
    elif pipeline.shown_schedule.startswith("interleaved") and pipeline.chunks == 1:
        problems.add(f"{schedule} needs pipeline.num_chunks > 1; set it to 2, or use 1f1b")


def _check_file(problems: ConfigErrors, config: ResolvedConfig, file: ScheduleFile) -> bool:
    """Check that a schedule from a file is for this run; return whether its stages are known."""
    shown, schedule = problems.shown("pipeline.schedule_file"), file.schedule
    pp, chunks = config.parallel.pp, {len(mine) for mine in file.stages}
    other = "or use a file for these sizes"
    if schedule.is_forward_only:
        problems.add(f"{shown} has forwards only, which train nothing; add a backward for each")
    if len(chunks) > 1:
        problems.add(
            f"{shown} has {min(chunks)} to {max(chunks)} stages on a rank; every rank must hold "
            f"equally many: use 1 or {max(chunks)} on each"
        )
    elif config.pipeline.chunks != schedule.num_chunks:
        problems.add(
            f"{problems.shown('pipeline.num_chunks')} does not fit {shown}, which has "
            f"{schedule.num_chunks}; leave num_chunks out, {other}"
        )
    elif pp != schedule.num_ranks:
        problems.add(
            f"{problems.shown('parallel.pp')} does not fit {shown}, which is for "
            f"{schedule.num_ranks}; set parallel.pp to {schedule.num_ranks}, {other}"
        )
    _check_microbatches(problems, config, file)
    return chunks == {config.pipeline.chunks} and pp == schedule.num_ranks


def _check_microbatches(problems: ConfigErrors, config: ResolvedConfig, file: ScheduleFile) -> None:
    """Check the number of microbatches, if the batch can be divided into any."""
    train, parallel, count = config.train, config.parallel, file.schedule.num_microbatches
    unit = train.microbatch_size * config.dp(problems.world_size)
    ranks = parallel.tp * parallel.cp * parallel.pp
    if problems.world_size % ranks or parallel.pp != file.schedule.num_ranks:
        return
    if train.global_batch_size % unit == 0 and train.global_batch_size != count * unit:
        problems.add(
            f"{problems.shown('train.global_batch_size')} / ("
            f"{problems.shown('train.microbatch_size')} x dp {config.dp(problems.world_size)}) is "
            f"{config.num_microbatches(problems.world_size)} microbatches per step, but "
            f"{problems.shown('pipeline.schedule_file')} is for {count}; set "
            f"train.global_batch_size to {count * unit}, or use a file for these sizes"
        )


def _check_options(problems: ConfigErrors, config: ResolvedConfig) -> None:
    """Check options that not all schedules support."""
    pipeline, info = config.pipeline, config.pipeline.schedule_info
    schedule = _shown_schedule(problems)
    if pipeline.group_size is not None and (info is None or not info.takes_group_size):
        problems.add(
            f"{problems.shown('pipeline.group_size')} needs one of the schedules "
            f"{_names(lambda other: other.takes_group_size)}, but {schedule}; leave group_size out "
            "or change the schedule"
        )
    is_searched = info is None and pipeline.schedule_file is None
    if not is_searched and pipeline.memory_limit is not None:
        problems.add(
            f"{problems.shown('pipeline.memory_limit')} is for the schedule auto, but "
            f"{schedule}; leave memory_limit out or change the schedule"
        )


def _check_overlap_moe(problems: ConfigErrors, config: ResolvedConfig) -> None:
    place, pipeline = problems.shown("pipeline.overlap_moe"), config.pipeline
    info = pipeline.schedule_info
    schedule = _shown_schedule(problems)
    has_pairs = pipeline.schedule in ("dualpipe_v", "dualpipe")
    if pipeline.file is not None:
        has_pairs = pipeline.file.has_pairs
    if not has_pairs and (info is None or not info.takes_pairs):
        problems.add(
            f"{place} needs a schedule that pairs a forward with the backward of another "
            f"microbatch, but {schedule} has none; use "
            f"{_names(lambda other: other.takes_pairs)}, dualpipe_v or dualpipe, or turn it off"
        )
    elif pipeline.pairs == "split" and has_pairs:
        problems.add(
            f"{problems.shown('pipeline.pairs')} computes weight gradients separately, which is "
            f"for the schedules {_names(lambda other: other.takes_pairs)}, but {schedule}; change "
            'that, or set pairs = "whole"'
        )
    if config.moe.num_experts == 0 or config.parallel.ep == 1:
        key = "moe.num_experts" if config.moe.num_experts == 0 else "parallel.ep"
        problems.add(
            f"{place} hides the way of rows between ranks that share experts, but "
            f"{problems.shown(key)}; turn it off"
        )
    elif config.moe.dispatcher == "allgather":
        problems.add(
            f"{place} needs exchanges that can be started and waited for, but "
            f"{problems.shown('moe.dispatcher')}; use alltoall or static, or turn it off"
        )
    if config.graphs.mode != "off":
        problems.add(
            f"{place} runs parts of two passes in turns, but graphs share memory in the order of "
            f'whole passes: {problems.shown("graphs.mode")}; set mode = "off", or turn it off'
        )


def _shown_schedule(problems: ConfigErrors) -> str:
    has_file = problems.config.pipeline.schedule_file is not None
    return problems.shown("pipeline.schedule_file" if has_file else "pipeline.schedule")


def _names(matches: Callable[[ScheduleInfo], bool]) -> str:
    return ", ".join(info.name for info in schedule_catalog() if matches(info))


def _check_layers(problems: ConfigErrors, config: ResolvedConfig) -> None:
    pipeline, pp, layers = config.pipeline, config.parallel.pp, config.model.num_layers
    if pipeline.layout is not None:
        _check_pipeline_layout(problems, config)
        return
    stages = pp * pipeline.stages_per_rank
    if stages > layers:
        chunks = _shown_chunks(problems, config)
        if pipeline.copies > 1:
            chunks = f"{chunks} / {pipeline.copies} copies of the model"
        problems.add(
            f"{problems.shown('model.num_layers')} cannot fill the {stages} stages of "
            f"{problems.shown('parallel.pp')} x {chunks}; "
            f"use at least {stages} layers, or at most {layers} stages"
        )
        return
    if not layers_fit(config):
        settings = [problems.shown("parallel.pp")]
        if pipeline.stages_per_rank > 1:
            settings.append(_shown_chunks(problems, config))
        fixes = nearest_fits(config, problems.world_size)
        problems.add(
            f"{problems.shown('model.num_layers')} cannot be dealt to pipeline stages with "
            f"{', '.join(settings)}, of which each holds equally many; nearest, changing one "
            f"setting: {', or '.join(fixes)}"
        )


def _shown_chunks(problems: ConfigErrors, config: ResolvedConfig) -> str:
    if config.pipeline.schedule_file is None:
        return problems.shown("pipeline.num_chunks")
    return f"{config.pipeline.chunks} chunks of {problems.shown('pipeline.schedule_file')}"


def _check_pipeline_layout(problems: ConfigErrors, config: ResolvedConfig) -> None:
    place = f"pipeline.layout ({config.origin('pipeline.layout')})"
    try:
        stages, further = layers_of_stages(config), mtp_stage(config)
    except ValueError as error:
        problems.add(f"{place}: {error}")
        return
    for rank, mine in enumerate(stages_of_ranks(config.pipeline, config.parallel.pp)):
        # The first stage has the embedding and the last one the head, with or without layers.
        if not any(stages[stage] or stage in (0, further, len(stages) - 1) for stage in mine):
            problems.add(
                f"{place}: pipeline rank {rank} gets neither layers nor embedding nor head, so it "
                f"has nothing to train; give one of its stages ({', '.join(map(str, mine))}) a "
                "layer, a t"
            )
