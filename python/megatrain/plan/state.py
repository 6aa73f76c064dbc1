"""Weights, gradients and optimizer state of a rank: buffers and their bytes, without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megacore._core import BufferPlan
from megacore.buffers.bucket_plan import plan_buckets
from megacore.errors import ConfigError
from megacore.optim.memory import MemoryRow, memory_row
from megacore.optim.param_group import group_of, require_matches, settings_of
from megacore.optim.update_rule import DTYPE_BYTES, UpdateRule
from megacore.parallel.param_info import ParamInfo
from megacore.suggest import nearest
from megatrain.config import (
    Config,
    LoraConfig,
    OptimizerConfig,
    ParallelConfig,
    ResolvedConfig,
    layers_of_stages,
    mtp_stage,
    stages_of_ranks,
)
from megatrain.config.lora import is_adapter, unmatched
from megatrain.models.param_infos import GPTInfos, takes_fp8

# Elements of a block of a rounded weight along each of its dimensions.
_SCALE_BLOCK = 128


def check_param_groups(config: Config, names: Collection[str]) -> None:
    """Check ``[lora]`` and `optimizer.groups` for the names of all parameters of the model.

    Raises:
        ConfigError: If a target of adapters does not exist, a group gets no parameter, or all
            parameters are frozen.
    """
    if config.lora.is_on:
        _check_targets(config, names)
    frozen_first = config.lora.param_groups()
    trained = [name for name in names if not group_of(name, frozen_first).frozen]
    param_groups = config.optimizer.param_groups()
    try:
        require_matches(param_groups, trained)
    except ValueError as error:
        raise ConfigError(f"optimizer.groups: {error}") from error
    if names and all(group_of(name, param_groups).frozen for name in trained):
        raise ConfigError(
            f'optimizer.groups: all {len(trained)} parameters are frozen (optimizer = "none"), so '
            "nothing would be trained; leave some out"
        )


def _check_targets(config: Config, names: Collection[str]) -> None:
    lora, base = config.lora, [name for name in names if not is_adapter(name)]
    projections = [name.rpartition(".")[0] for name in names if name.endswith(".lora_a")]
    if (missing := unmatched(lora.targets, projections)) is not None:
        known = projections
        if config.model.factory is None:
            every = LoraConfig(rank=1)
            stage = GPTInfos.of(config.model, config.moe, lora=every).stage(
                range(config.model.num_layers), has_embedding=False, has_head=False
            )
            known = [name.rpartition(".")[0] for name in stage if name.endswith(".lora_a")]
        ends = sorted({name.rpartition(".")[2] for name in known})
        raise ConfigError(
            f"lora.targets must match names of projections, but {missing!r} matches none of "
            f"{len(known)}, whose names end in {', '.join(ends)}"
        )
    if (missing := unmatched(lora.modules_to_save, base)) is not None:
        if config.model.tie_embeddings and unmatched([missing], ["head", "lm_head"]) is None:
            raise ConfigError(
                f"lora.modules_to_save must match names of parameters, but {missing!r} matches "
                "none: the output layer has the weights of the embedding "
                "(model.tie_embeddings = true); name 'embedding', which trains both"
            )
        close = ", ".join(nearest(missing, sorted(base), count=3))
        raise ConfigError(
            f"lora.modules_to_save must match names of parameters, but {missing!r} matches none "
            f"of {len(base)}; nearest: {close}"
        )


@dataclass(frozen=True, kw_only=True)
class RankState:
    """Buffers of a pipeline rank and their bytes, with padding.

    Attributes:
        buffers: Positions of its parameters and layout of each buffer; frozen ones are in none.
        param_bytes: Parameter buffers, and frozen parameters.
        grad_bytes: Gradient buffers.
        optimizer_bytes: State of the optimizer, main parameters unless the parameters are float32,
            and moving average of the weights, if there is one, of the rank's shard.
    """

    buffers: tuple[tuple[list[int], BufferPlan], ...]
    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int


def memory_rows_of(optimizer: OptimizerConfig, *, dtype: str) -> dict[str, MemoryRow]:
    """Compute the bytes per parameter, by kind of parameters; ``dtype`` is ``train.dtype``."""
    grads = dtype if optimizer.grad_dtype != "float32" else "float32"
    return {
        kind: memory_row(params=dtype, grads=grads, rule=rule, average=optimizer.ema_decay > 0)
        for kind, rule in optimizer.rule().rules_by_kind().items()
    }


def rule_of(optimizer: OptimizerConfig) -> Callable[[ParamInfo], UpdateRule]:
    """Return the function that gives the update rule of a parameter."""
    rule, param_groups = optimizer.rule(), optimizer.param_groups()
    return lambda info: settings_of(info, param_groups, rule=rule, weight_decay=0.0).rule


def mean_sharded_bytes(config: ResolvedConfig) -> float:
    """Return the bytes of optimizer state and main parameter per parameter of the model."""
    optimizer, model = config.optimizer, config.model
    rows = memory_rows_of(optimizer, dtype=config.train.dtype)
    if len(rows) == 1 and not config.param_groups():
        return float(next(iter(rows.values())).sharded)
    infos = GPTInfos.of(model, config.moe, lora=config.lora).stage(
        range(model.num_layers), has_embedding=True, has_head=True, mtp_layers=model.mtp_layers
    )
    rule, param_groups = rule_of(optimizer), config.param_groups()
    numels, sums = 0, Fraction(0)
    for info in infos.values():
        if group_of(info.name, param_groups).frozen:
            continue
        numel = math.prod(info.full_shape)
        numels += numel
        copies = (config.train.dtype != "float32" and not info.wide) + (optimizer.ema_decay > 0)
        sums += numel * (4 * copies + rule(info).state_bytes)
    return float(sums / max(1, numels))


def ranks_per_buffer(config: ResolvedConfig, world_size: int) -> tuple[int, int]:
    """Return the ranks that share the buffers of dense parameters, and those of experts."""
    dense, experts = config.holders(world_size)
    instances = config.optimizer.sharded_instances
    return dense // instances, experts // instances


def plan_state(config: ResolvedConfig, world_size: int, infos: Sequence[ParamInfo]) -> RankState:
    """Plan the buffers of ``make_buffers`` for the parameters of a rank, which have one dtype."""
    dense, experts = ranks_per_buffer(config, world_size)
    optimizer, rule = config.optimizer, rule_of(config.optimizer)
    by_kind: dict[tuple[str, bool, bool, UpdateRule], list[int]] = {}
    param_groups, frozen = config.param_groups(), 0
    for position, info in enumerate(infos):
        if group_of(info.name, param_groups).frozen:
            frozen += local_numel(config.parallel, info)
            continue
        kind = (
            "float32" if info.wide else config.train.dtype,
            info.expert,
            info.sequence_parallel,
            rule(info),
        )
        by_kind.setdefault(kind, []).append(position)
    buffers = tuple(
        (
            positions,
            plan_buckets(
                [local_numel(config.parallel, infos[position]) for position in positions],
                dp_size=experts if expert else dense,
                bucket_numel=config.optimizer.bucket_numel,
                shared=[infos[position].shared is not None for position in positions],
                pad_for_ring=config.optimizer.pad_for_ring,
                unit=own.unit,
            ),
        )
        for (_, expert, _, own), positions in by_kind.items()
    )
    param_bytes = frozen * DTYPE_BYTES[config.train.dtype]
    grad_bytes, state, average = 0, Fraction(0), 0
    for (dtype, _, _, own), (_, plan) in zip(by_kind, buffers, strict=True):
        row = next(iter(memory_rows_of(optimizer, dtype=dtype).values()))
        param_bytes += plan.numel * row.param_bytes
        grad_bytes += plan.numel * row.grad_bytes
        size = plan.shard_numel if optimizer.distributed else plan.numel
        main = 4 if dtype != "float32" else 0
        state += size * (main + own.state_bytes)
        if optimizer.ema_decay > 0:  # without padding, of which the first rank has least
            average += 4 * _used_numel(plan, optimizer.distributed)
    return RankState(
        buffers=buffers,
        param_bytes=param_bytes,
        grad_bytes=grad_bytes,
        optimizer_bytes=average + int(state),
    )


def _used_numel(plan: BufferPlan, distributed: bool) -> int:
    """Return the elements of parameters that the first rank optimizes."""
    if distributed:
        return sum(piece.numel for piece in plan.shard(0))
    ranges = map(plan.param_range, range(plan.num_params))
    return sum(end - start for start, end in ranges)


def local_numel(parallel: ParallelConfig, info: ParamInfo) -> int:
    """Return the elements of a parameter on a rank."""
    return math.prod(_local_shape(parallel, info))


def _local_shape(parallel: ParallelConfig, info: ParamInfo) -> tuple[int, ...]:
    tp = (parallel.etp or parallel.tp) if info.expert else parallel.tp
    return info.local_shape(tp, ep_size=parallel.ep)


def rounded_bytes(parallel: ParallelConfig, infos: Iterable[ParamInfo]) -> int:
    """Return the bytes of the weights that stay in 8 bits, as they are and transposed.

    Args:
        parallel: The ``[parallel]`` section.
        infos: All parameters of a rank.
    """
    total = 0
    for info in filter(takes_fp8, infos):
        *rows, width = _local_shape(parallel, info)
        num = rows.pop(0) if info.expert else 1
        height = math.prod(rows)
        scales = -(-height // _SCALE_BLOCK) * -(-width // _SCALE_BLOCK)
        total += 2 * num * (height * width + 4 * scales)
    return total


def state_bytes(config: ResolvedConfig, world_size: int) -> list[dict[str, float]]:
    """Return the bytes of weights, gradients and optimizer state of each pipeline rank, exactly.

    With `train.fp8`, also those of weights that stay in 8 bits. Parameters are listed from the
    shapes that the model is built with.
    """
    infos = [
        list(_stage_infos(config, sorted(mine)))
        for mine in stages_of_ranks(config.pipeline, config.parallel.pp)
    ]
    names = {info.name for of_rank in infos for info in of_rank}
    check_param_groups(config, names)
    states = [plan_state(config, world_size, of_rank) for of_rank in infos]
    found: list[dict[str, float]] = [
        {
            "weights": state.param_bytes,
            "gradients": state.grad_bytes,
            "optimizer": state.optimizer_bytes,
        }
        for state in states
    ]
    if config.keeps_rounded_weights(world_size):
        for own, of_rank in zip(found, infos, strict=True):
            own["8-bit weights"] = rounded_bytes(config.parallel, of_rank)
    return found


def _stage_infos(config: ResolvedConfig, mine: list[int]) -> Iterator[ParamInfo]:
    """List the parameters of a rank's stages in the order in which the model makes them."""
    model, stages, further = config.model, layers_of_stages(config), mtp_stage(config)
    sequence_parallel = config.parallel.sequence_parallel
    infos = GPTInfos.of(model, config.moe, sequence_parallel=sequence_parallel, lora=config.lora)
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
