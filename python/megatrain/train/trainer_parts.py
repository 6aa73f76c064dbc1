"""Parts of a trainer, each made from the resolved configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megacore.buffers import ParamGradBuffer, make_buffers
from megacore.calls.ring import CallRing
from megacore.errors import ConfigError
from megacore.optim import (
    DistributedOptimizer,
    FrozenParams,
    OptimizerOptions,
    RoundedWeights,
    WeightAverage,
    split_frozen,
)
from megacore.parallel import ProcessGroups
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.instances import HybridShardGroups
from megacore.pipeline import (
    PipelineExecutor,
    Program,
    Schedule,
    receives_for,
)
from megacore.pipeline.clock import PhaseClock
from megatrain.config import DebugConfig, ResolvedConfig, ResolvedOptimizerConfig
from megatrain.models.build import group_loss_of, in_model_order
from megatrain.models.size import count_parameters
from megatrain.models.stage import Stage
from megatrain.plan.layout import (
    activation_spec,
    activation_specs,
    embedding_ranks,
    make_topology,
    train_recompute,
)
from megatrain.plan.state import check_param_groups, rule_of
from megatrain.routing_trace import Recorded, RoutingRecorder, RoutingReplay, RoutingTape
from megatrain.train.control import NUM_VOTES
from megatrain.train.graphs import StepGraphs
from megatrain.train.meters import ExpertLoadMeter, GroupLossMeter, MTPLossMeter
from megatrain.train.step import EagerStep


def make_groups(
    config: ResolvedConfig, world_size: int, *, calls: CallRing | None = None
) -> ProcessGroups:
    """Create the process groups of this rank; collective.

    Args:
        config: Resolved configuration.
        world_size: Number of ranks. Above 1, ``torch.distributed`` must be initialized.
        calls: Records the collectives and messages of this rank.

    Raises:
        ConfigError: If the layout is invalid for the number of ranks.
    """
    if world_size == 1:
        return ProcessGroups.single()
    return ProcessGroups.create(
        make_topology(config.parallel, world_size),
        timeout_s=config.run.timeout_s,
        host_memory=config.run.host_memory,
        pp_channels=config.pipeline.overlap_p2p and config.run.backend == "nccl",
        pp_ends=embedding_ranks(config),
        pp_copies=config.pipeline.copies,
        calls=calls,
    )


def make_run_buffers(
    config: ResolvedConfig, groups: ProcessGroups, chunks: Sequence[Stage]
) -> tuple[list[ParamGradBuffer], FrozenParams]:
    """Make the buffers of a rank's parameters, and freeze those of such groups; collective.

    Raises:
        ConfigError: On every rank, if a group gets no parameter, or all are frozen.
    """
    order = in_model_order(config.pipeline, groups.pp)
    params = [param for number in order for param in chunks[number].param_infos()]
    optimizer, param_groups = config.optimizer, config.param_groups()
    if param_groups and not groups.world.is_fake:  # else those of other ranks are not known
        names = [info.name for info, _ in params]
        names = sorted(set().union(*all_gather_objects(names, groups.world)))
        check_param_groups(config, names)
    trained, frozen = split_frozen(params, param_groups)
    instances = HybridShardGroups.split(
        groups,
        optimizer.sharded_instances,
        timeout_s=config.run.timeout_s,
        host_memory=config.run.host_memory,
    )
    rule = rule_of(optimizer)
    buffers = make_buffers(
        trained,
        groups=groups,
        options=optimizer.buffer_options(),
        instances=instances,
        kind_of=rule,
        unit_of=lambda info: rule(info).unit,
    )
    return buffers, FrozenParams(frozen)


def optimizer_options(optimizer: ResolvedOptimizerConfig, num_summed: int) -> OptimizerOptions:
    """Return the options of the optimizer, for gradients of sums over ``num_summed`` tokens.

    With a mean per token, gradients are sums until the tokens of all ranks are counted: the loss
    scale of the mean would overflow in the first steps.
    """
    options = optimizer.options()
    scale = options.loss_scale / 2.0 ** math.ceil(math.log2(num_summed))
    return replace(options, loss_scale=max(1.0, scale))


def count_params(config: ResolvedConfig, chunks: Sequence[Stage], groups: ProcessGroups) -> int:
    """Count the parameters of the whole model; those of one's own, on all stages. Collective.

    Raises:
        ConfigError: On every rank, if stages of one's own disagree on names or shared parameters.
    """
    if config.model.factory is None:
        count = count_parameters(config.model, config.moe)
        return count.total - count.padding
    shown = f'model.factory = "{config.model.factory}"'
    mine = [info for chunk in chunks for info, _ in chunk.param_infos()]
    if groups.pp.is_fake:  # the stages of other ranks are not known
        return sum(math.prod(info.full_shape) for info in mine)
    by_rank = all_gather_objects(mine, groups.pp)
    shared = [[info for info in infos if info.shared is not None] for infos in by_rank]
    holders = {rank for rank, infos in enumerate(shared) if infos}
    expected = set(embedding_ranks(config)) if config.pipeline.copies == 1 else holders
    if max(map(len, shared)) > 1 or (holders and holders != expected):
        raise ConfigError(
            f"{shown}: a tied embedding must be one shared parameter on the first and one on the "
            "last stage; use Embedding(context, is_shared=not context.is_last) and Head(context, "
            "tied_weight=...) with the embedding of this rank or context.tied_weight"
        )
    counts: dict[str, int] = {}
    # With two copies of the model, the second half of the ranks has the second copy.
    for infos in by_rank[: groups.pp.size // config.pipeline.copies]:
        for info in infos:
            if info.name in counts and not info.is_shared_copy:
                raise ConfigError(
                    f"{shown}: two parameters are called {info.name}; name them by the global "
                    "number of their layer"
                )
            counts[info.name] = math.prod(info.full_shape)
    return sum(counts.values())


def make_step(
    config: ResolvedConfig,
    schedule: Schedule,
    groups: ProcessGroups,
    chunks: list[Stage],
    optimizer: DistributedOptimizer,
    average: WeightAverage | None,
    *,
    per_token: bool,
    clock: PhaseClock,
    device: torch.device,
) -> tuple[EagerStep, StepGraphs | None]:
    """Make the passes and the update of a step, and their graphs if there are any; collective.

    Args:
        config: Resolved configuration.
        schedule: The pipeline schedule of a training step, all ranks.
        groups: Process groups of this rank.
        chunks: Model chunks of this rank.
        optimizer: Optimizer over their parameters.
        average: Moving average of the weights; ``None`` without one.
        per_token: Whether the loss is a mean over all tokens of a step.
        clock: Measures the phases of steps.
        device: Device of the model.
    """
    world_size = groups.topology.world_size
    compared = group_loss_of(config)
    program, executor = _make_executor(config, schedule, groups, chunks, clock, device=device)
    eager = EagerStep(
        chunks,
        optimizer,
        groups,
        executor,
        program=program,
        num_microbatches=config.num_microbatches(world_size),
        experts=_watch_experts(config, chunks, groups, device=device),
        predictions=MTPLossMeter(
            chunks, num_depths=config.model.num_mtp_layers, groups=groups, device=device
        ),
        group_metrics=GroupLossMeter(
            chunks,
            names=() if compared is None else compared[0].metrics,
            groups=groups,
            device=device,
        ),
        group_size=0 if compared is None else compared[0].group_size,
        clock=clock,
        per_token=per_token,
        num_votes=NUM_VOTES,
        limits_loss=config.train.on_spike == "skip",
        counts_zeros=config.debug.count_zeros,
        average=average,
        # After the optimizer, whose hooks gather weights before they are rounded.
        rounded=RoundedWeights(chunks) if config.keeps_rounded_weights(world_size) else None,
    )
    if config.graphs.mode == "off":
        return eager, None
    hidden = activation_spec(config.model, config.parallel, config.train, device=device)
    return eager, StepGraphs(config, eager, program=program, hidden=hidden)


def _make_executor(
    config: ResolvedConfig,
    schedule: Schedule,
    groups: ProcessGroups,
    chunks: Sequence[Stage],
    clock: PhaseClock,
    *,
    device: torch.device,
) -> tuple[Program, PipelineExecutor]:
    """Make this rank's program and its executor. Collective."""
    activation = activation_specs(config, device)
    receives = receives_for(groups.pp, activation, overlap=config.pipeline.overlap_p2p)
    program = schedule.program(
        groups.pp.position, receives=receives, recompute=train_recompute(config.train)
    )
    executor = PipelineExecutor(
        program,
        chunks,
        group=groups.pp,
        activation=activation,
        channels=groups.pp_channels,
        check_messages=config.debug.check_messages,
        overlap_pairs=config.pipeline.overlap_moe,
        schedule=schedule,
        clock=clock,
    )
    return program, executor


def _watch_experts(
    config: ResolvedConfig, chunks: list[Stage], groups: ProcessGroups, *, device: torch.device
) -> ExpertLoadMeter:
    return ExpertLoadMeter(
        chunks,
        moe=config.moe,
        num_layers=config.model.mtp_layers.stop,
        groups=groups,
        num_microbatches=config.num_microbatches(groups.topology.world_size),
        device=device,
    )


def attach_tape(
    debug: DebugConfig, settings: Recorded, chunks: Sequence[Stage], *, rank: int
) -> RoutingTape:
    """Create the routing recorder and replay of the configuration, and attach them to all routers.

    Args:
        debug: The ``[debug]`` section.
        settings: Those that a replay must match.
        chunks: Model chunks of this rank.
        rank: Global rank of this process.
    """
    tape = RoutingTape(
        recorder=None
        if debug.record_routing is None
        else RoutingRecorder(Path(debug.record_routing), settings, rank=rank),
        replay=None if debug.replay_routing is None else RoutingReplay(Path(debug.replay_routing)),
    )
    if tape != RoutingTape():
        for chunk in chunks:
            for layer in chunk.moe_layers().values():
                layer.router.tape = tape
    return tape
