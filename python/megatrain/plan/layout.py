"""Layout, schedule and activation specs of a run, as pure functions of its configuration."""

from __future__ import annotations

from dataclasses import replace

import torch

from megacore.errors import ConfigError
from megacore.parallel import Topology
from megacore.pipeline import Recompute, Schedule
from megacore.pipeline.executor import ActivationSpec
from megatrain.config import (
    Config,
    ModelConfig,
    ParallelConfig,
    ResolvedConfig,
    ResolvedTrainConfig,
    TrainSectionConfig,
    layers_of_stages,
    mtp_stage,
    stages_of_ranks,
)
from megatrain.config.resolved import ResolvedParallelConfig
from megatrain.models.build import torch_dtype
from megatrain.plan.schedules import ScheduleShape, cached_schedule


def embedding_ranks(config: Config) -> tuple[int, ...]:
    """Find the pipeline ranks of all stages that use the embedding.

    Example:
        >>> embedding_ranks(Config(parallel={"pp": 4}))
        (0, 3)
        >>> untied = {"tie_embeddings": False, "num_mtp_layers": 1}
        >>> layout = {"layout": "Et|t|tt,m|L"}
        >>> embedding_ranks(Config(model=untied, parallel={"pp": 4}, pipeline=layout))
        (0, 2)
    """
    by_rank = stages_of_ranks(config.pipeline, config.parallel.pp)
    further = mtp_stage(config)
    stages = [0]
    if config.model.tie_embeddings or further is None:
        stages.append(config.parallel.pp * config.pipeline.stages_per_rank - 1)
    if further is not None:
        stages.append(further)
    return tuple(
        next(rank for rank, mine in enumerate(by_rank) if stage in mine) for stage in stages
    )


def make_topology(parallel: ResolvedParallelConfig, world_size: int) -> Topology:
    """Build the topology of the ``[parallel]`` section."""
    return Topology(
        world_size=world_size,
        tp=parallel.tp,
        cp=parallel.cp,
        pp=parallel.pp,
        ep=parallel.ep,
        etp=parallel.etp,
        order=parallel.order,
    )


def train_schedule(config: Config, world_size: int) -> Schedule:
    """Return the schedule of one training step; forked ranks share the one that was checked.

    Raises:
        ConfigError: If the schedule cannot be built; the message lists the nearest valid sizes.
    """
    pipeline, num_microbatches = config.pipeline, config.num_microbatches(world_size)
    try:
        return cached_schedule(
            ScheduleShape(
                pipeline.shown_schedule,
                config.parallel.pp,
                num_microbatches,
                pipeline.chunks,
                pipeline.group_size,
                pipeline.memory_limit,
                pipeline.requested_pairs,
                pipeline.searched_placement,
                pipeline.file,
            )
        )
    except ValueError as error:
        train, dp = config.train, config.dp(world_size)
        raise ConfigError(
            f"pipeline.schedule = {pipeline.shown_schedule} with {num_microbatches} microbatches "
            f"per step (train.global_batch_size {train.global_batch_size} / (train.microbatch_size "
            f"{train.microbatch_size} x dp {dp})): {error}"
        ) from error


def train_recompute(train: TrainSectionConfig) -> Recompute | None:
    """Build the recompute policy of a training step; ``None`` without recomputation."""
    return Recompute(keep=train.recompute_keep) if train.recompute else None


def activation_specs(config: ResolvedConfig, device: torch.device) -> dict[int, ActivationSpec]:
    """Build the output spec of each stage except the last, for every copy of the model.

    ``(S/cp, B, H)``, with sequence parallelism ``(S/cp/tp, B, H)``; from the stage of the
    multi-token prediction layers on, the outputs of all depths, concatenated along the sequence.
    """
    num_stages, further = len(layers_of_stages(config)), mtp_stage(config)
    plain = activation_spec(config.model, config.parallel, config.train, device=device)
    length, *others = plain.shape
    all_depths = replace(plain, shape=((1 + config.model.num_mtp_layers) * length, *others))
    return {
        copy * num_stages + stage: plain if further is None or stage < further else all_depths
        for copy in range(config.pipeline.copies)
        for stage in range(num_stages - 1)
    }


def activation_spec(
    model: ModelConfig,
    parallel: ParallelConfig,
    train: ResolvedTrainConfig,
    *,
    device: torch.device,
) -> ActivationSpec:
    """Build the spec: ``(S/cp, B, H)``, with sequence parallelism ``(S/cp/tp, B, H)``."""
    slices = parallel.cp * (parallel.tp if parallel.sequence_parallel else 1)
    sequence = model.seq_length // slices
    return ActivationSpec(
        shape=(sequence, train.microbatch_size, model.hidden_size),
        dtype=torch_dtype(train.dtype),
        device=device,
    )
