"""Weights, gradients and optimizer state of a rank: buffers and their bytes, without torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megacore._core import BufferPlan, plan_buckets
from megacore.errors import ConfigError
from megacore.optim.memory import MemoryRow, frozen_numel, memory_row
from megacore.optim.param_group import ParamGroup, group_of, require_matches
from megacore.parallel.param_info import ParamInfo
from megatrain.config import (
    OptimizerConfig,
    ParallelConfig,
    ResolvedConfig,
    layers_of_stages,
    mtp_stage,
    stages_of_ranks,
)
from megatrain.models.param_infos import GPTInfos


def check_param_groups(param_groups: Sequence[ParamGroup], names: Collection[str]) -> None:
    """Check `optimizer.groups` for the names of all parameters of the model.

    Raises:
        ConfigError: If a group gets no parameter, or all parameters are frozen.
    """
    try:
        require_matches(param_groups, names)
    except ValueError as error:
        raise ConfigError(f"optimizer.groups: {error}") from error
    if names and all(group_of(name, param_groups).frozen for name in names):
        raise ConfigError(
            f'optimizer.groups: all {len(names)} parameters are frozen (optimizer = "none"), so '
            "nothing would be trained; leave some out"
        )


@dataclass(frozen=True, kw_only=True)
class RankState:
    """Buffers of a pipeline rank and their bytes, with padding.

    Attributes:
        buffers: Positions of its parameters and layout of each buffer; frozen ones are in none.
        param_bytes: Parameter buffers, and frozen parameters.
        grad_bytes: Gradient buffers.
        optimizer_bytes: Moments, main parameters unless the parameters are float32, and moving
            average of the weights, if there is one, of the rank's shard; where groups have
            optimizers of other sizes, the mean over the shards.
    """

    buffers: tuple[tuple[list[int], BufferPlan], ...]
    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int


def memory_row_of(optimizer: OptimizerConfig, *, dtype: str) -> MemoryRow:
    """Compute the bytes per parameter; ``dtype`` is that of the parameters, ``train.dtype``."""
    grads = dtype if optimizer.grad_dtype != "float32" else "float32"
    return memory_row(
        params=dtype, grads=grads, rule=optimizer.rule(), average=optimizer.ema_decay > 0
    )


def ranks_per_buffer(config: ResolvedConfig, world_size: int) -> tuple[int, int]:
    """Return the ranks that share the buffers of dense parameters, and those of experts."""
    dense, experts = config.holders(world_size)
    instances = config.optimizer.sharded_instances
    return dense // instances, experts // instances


def plan_state(config: ResolvedConfig, world_size: int, infos: Sequence[ParamInfo]) -> RankState:
    """Plan the buffers of ``make_buffers`` for the parameters of a rank, which have one dtype."""
    dense, experts = ranks_per_buffer(config, world_size)
    by_kind: dict[tuple[bool, bool], list[int]] = {}
    param_groups, frozen = config.optimizer.param_groups(), 0
    for position, info in enumerate(infos):
        if group_of(info.name, param_groups).frozen:
            frozen += frozen_numel(local_numel(config.parallel, info))
            continue
        by_kind.setdefault((info.expert, info.sequence_parallel), []).append(position)
    buffers = tuple(
        (
            positions,
            plan_buckets(
                [local_numel(config.parallel, infos[position]) for position in positions],
                dp_size=experts if expert else dense,
                bucket_numel=config.optimizer.bucket_numel,
                shared=[infos[position].shared is not None for position in positions],
                param_alignment=64,
                bucket_alignment=None,
                pad_for_ring=config.optimizer.pad_for_ring,
            ),
        )
        for (expert, _), positions in by_kind.items()
    )
    numel = sum(plan.numel for _, plan in buffers)
    row = memory_row_of(config.optimizer, dtype=config.train.dtype)
    optimizer_bytes = 0
    for positions, plan in buffers:
        owned = plan.shard_numel if config.optimizer.distributed else plan.numel
        more = _more_state(config, [infos[position] for position in positions])
        optimizer_bytes += int(owned * (row.sharded + more))
    return RankState(
        buffers=buffers,
        param_bytes=(numel + frozen) * row.param_bytes,
        grad_bytes=numel * row.grad_bytes,
        optimizer_bytes=optimizer_bytes,
    )


def _more_state(config: ResolvedConfig, infos: Sequence[ParamInfo]) -> Fraction:
    """Return the mean bytes of state that optimizers of groups add per element of a buffer."""
    param_groups, base = config.optimizer.param_groups(), config.optimizer.rule().state_bytes
    more, numel = Fraction(0), 0
    for info in infos:
        rule = group_of(info.name, param_groups).rule
        own = local_numel(config.parallel, info)
        numel += own
        if rule is not None:
            more += own * (rule.state_bytes - base)
    return more / numel


def local_numel(parallel: ParallelConfig, info: ParamInfo) -> int:
    """Return the elements of a parameter on a rank."""
    tp = (parallel.etp or parallel.tp) if info.expert else parallel.tp
    return math.prod(info.local_shape(tp, ep_size=parallel.ep))


def state_bytes(config: ResolvedConfig, world_size: int) -> list[dict[str, float]]:
    """Return the bytes of weights, gradients and optimizer state of each pipeline rank, exactly.

    Parameters are listed from the shapes that the model is built with.
    """
    infos = [
        list(_stage_infos(config, sorted(mine)))
        for mine in stages_of_ranks(config.pipeline, config.parallel.pp)
    ]
    names = {info.name for of_rank in infos for info in of_rank}
    check_param_groups(config.optimizer.param_groups(), names)
    states = [plan_state(config, world_size, of_rank) for of_rank in infos]
    return [
        {
            "weights": state.param_bytes,
            "gradients": state.grad_bytes,
            "optimizer": state.optimizer_bytes,
        }
        for state in states
    ]


def _stage_infos(config: ResolvedConfig, mine: list[int]) -> Iterator[ParamInfo]:
    """List the parameters of a rank's stages in the order in which the model makes them."""
    model, stages, further = config.model, layers_of_stages(config), mtp_stage(config)
    infos = GPTInfos.of(model, config.moe, sequence_parallel=config.parallel.sequence_parallel)
    has_words = False
    for stage in mine:
        found = infos.stage(
            stages[stage],
            has_embedding=stage == 0,
            has_head=stage == len(stages) - 1,
            mtp_layers=model.mtp_layers if stage == further else (),
            has_words=has_words,
        )
        has_words = has_words or "embedding" in found
        yield from found.values()
