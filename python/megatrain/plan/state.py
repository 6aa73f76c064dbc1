"""Weights, gradients and optimizer state of a rank: buffers and their bytes, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megacore._core import BufferPlan, plan_buckets
from megacore.optim.memory import MemoryRow, memory_row
from megatrain.config import ResolvedConfig, layers_of_stages, mtp_stage, stages_of_ranks
from megatrain.models.size import LocalParam, layer_params, norm_params


@dataclass(frozen=True, kw_only=True)
class RankState:
    """Buffers of a pipeline rank and their bytes, with padding.

    Attributes:
        buffers: Positions of its parameters and layout of each buffer.
        param_bytes: Parameter buffers.
        grad_bytes: Gradient buffers.
        optimizer_bytes: Moments, and main parameters unless the parameters are float32, of the
            rank's shard.
    """

    buffers: tuple[tuple[list[int], BufferPlan], ...]
    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int


def memory_row_of(config: ResolvedConfig) -> MemoryRow:
    """Compute the bytes per parameter in a run of this configuration."""
    optimizer = config.optimizer
    grads = config.train.dtype if optimizer.grad_dtype != "float32" else "float32"
    return memory_row(params=config.train.dtype, grads=grads, moments=optimizer.moments_dtype)


def ranks_per_buffer(config: ResolvedConfig, world_size: int) -> tuple[int, int]:
    """Return the ranks that share the buffers of dense parameters, and those of experts."""
    dense, experts = config.holders(world_size)
    instances = config.optimizer.sharded_instances
    return dense // instances, experts // instances


def plan_state(config: ResolvedConfig, world_size: int, params: Sequence[LocalParam]) -> RankState:
    """Plan the buffers of ``make_buffers`` for the parameters of a rank, which have one dtype."""
    dense, experts = ranks_per_buffer(config, world_size)
    by_kind: dict[tuple[bool, bool], list[int]] = {}
    for position, param in enumerate(params):
        by_kind.setdefault((param.expert, param.partial), []).append(position)
    buffers = tuple(
        (
            positions,
            plan_buckets(
                [params[position].numel for position in positions],
                dp_size=experts if expert else dense,
                bucket_numel=config.optimizer.bucket_numel,
                shared=[params[position].shared for position in positions],
                param_alignment=64,
                bucket_alignment=None,
                pad_for_ring=config.debug.pad_for_ring,
            ),
        )
        for (expert, _), positions in by_kind.items()
    )
    numel = sum(plan.numel for _, plan in buffers)
    owned = sum(plan.shard_numel for _, plan in buffers) if config.optimizer.distributed else numel
    row = memory_row_of(config)
    return RankState(
        buffers=buffers,
        param_bytes=numel * row.param_bytes,
        grad_bytes=numel * row.grad_bytes,
        optimizer_bytes=owned * row.sharded,
    )


def state_bytes(config: ResolvedConfig, world_size: int) -> list[dict[str, float]]:
    """Return the bytes of weights, gradients and optimizer state of each pipeline rank, exactly.

    Parameters are listed from the shapes that the model is built with.
    """
    states = [
        plan_state(config, world_size, list(_params(config, sorted(mine))))
        for mine in stages_of_ranks(config)
    ]
    return [
        {
            "weights": state.param_bytes,
            "gradients": state.grad_bytes,
            "optimizer": state.optimizer_bytes,
        }
        for state in states
    ]


def _params(config: ResolvedConfig, mine: list[int]) -> Iterator[LocalParam]:
    """List the parameters of a rank's stages in the order in which the model makes them."""
    model, parallel = config.model, config.parallel
    stages, further = layers_of_stages(config), mtp_stage(config)
    sp = parallel.sequence_parallel
    matrix = model.padded_vocab_size // parallel.tp * model.hidden_size
    norm = norm_params(model, parallel)
    has_words = False
    for stage in mine:
        is_last, predicts = stage == len(stages) - 1, stage == further
        elsewhere = model.num_mtp_layers > 0 and not predicts
        if stage == 0:
            yield LocalParam(matrix, shared=elsewhere or (model.tie_embeddings and not is_last))
            has_words = True
        for index in stages[stage]:
            yield from layer_params(model, config.moe, index, parallel)
        if predicts or (is_last and not elsewhere):
            yield from norm
        if predicts:
            if not has_words:
                yield LocalParam(matrix, shared=True)
                has_words = True
            for index in model.mtp_layers:
                yield from norm
                yield from norm
                yield LocalParam(2 * model.hidden_size**2, partial=sp)
                yield from layer_params(model, config.moe, index, parallel)
                yield from norm
        if is_last and not model.tie_embeddings:
            yield LocalParam(matrix)
        elif is_last and not has_words:
            yield LocalParam(matrix, shared=True)
