"""Construction of a rank's model chunks from a resolved configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from megacore.errors import ConfigError
from megacore.moe.echo.slots import SlotBuffers
from megacore.parallel.batch import Microbatch
from megacore.parallel.process_groups import Group, ProcessGroups
from megatrain.config import (
    PipelineConfig,
    ResolvedConfig,
    layers_of_stages,
    mtp_stage,
    stages_of_ranks,
)
from megatrain.models.custom import OwnStage, StageContext, loss_of
from megatrain.models.gpt import GPTChunk
from megatrain.models.group_loss import GroupLoss, GroupLossSum
from megatrain.models.loss import FirstLossCheck, Loss, LossContext, token_loss
from megatrain.models.preference import PreferenceLoss
from megatrain.models.stage import ContextOptions, Stage, make_context


def build_chunks(
    config: ResolvedConfig,
    groups: ProcessGroups,
    *,
    device: torch.device | str = "cpu",
    initialize: bool = True,
) -> list[Stage]:
    """Build this pipeline rank's chunks, in the order of their stages.

    The schedule determines the stages: in a loop, chunk c is stage ``c * pp + pp_rank``; in a V,
    the two chunks are the stages ``pp_rank`` and ``2 * pp - 1 - pp_rank``; with two copies of the
    model, ``pp_rank`` of the first copy and ``pp - 1 - pp_rank`` of the second.

    Args:
        config: A resolved configuration.
        groups: This rank's process groups; the position in ``groups.pp`` determines the stages.
        device: Device of the parameters.
        initialize: Draw random weights; else they are left as they are.

    Returns:
        ``pipeline.chunks`` chunks. The first stage has the embedding, the last one the head. The
        layers for multi-token prediction are on the last stage or on that of the layout. Chunks on
        one rank that need the embedding share one parameter.

    Raises:
        ConfigError: If layers or tensor-parallel sizes do not fit.
    """
    mine = stages_of_ranks(config.pipeline, config.parallel.pp)[groups.pp.position]
    return build_stages(config, mine, groups, device=device, initialize=initialize)


def group_loss_of(config: ResolvedConfig) -> tuple[GroupLoss, str] | None:
    """Return the loss of groups of answers, and the setting that names it; ``None`` without.

    That of ``preference.loss``, or an object of ``train.loss`` with a ``group_size``.

    Raises:
        ConfigError: If ``train.loss`` cannot be imported, or its metrics are no names.
    """
    preference = config.preference
    if preference.loss is not None:
        loss = PreferenceLoss(
            preference.loss, beta=preference.beta, label_smoothing=preference.label_smoothing
        )
        return loss, f'preference.loss = "{preference.loss}"'
    own, shown = loss_of(config.train.loss), f'train.loss = "{config.train.loss}"'
    size, names = getattr(own, "group_size", None), getattr(own, "metrics", None)
    if size is None:
        return None
    is_named = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
    if not isinstance(size, int) or size < 1 or not is_named:
        raise ConfigError(
            f"{shown} must have a group_size of at least 1 and names as metrics, got {size!r} and "
            f"{names!r}"
        )
    if config.model.factory is not None or config.graphs.mode != "off":
        raise ConfigError(
            f"{shown} has a group_size, which needs megacore's GPT and graphs.mode = off"
        )
    return cast(GroupLoss, own), shown


def _checked_loss(config: ResolvedConfig, tp: Group, device: torch.device) -> Loss | GroupLossSum:
    """Return the loss of the run with a check of its first result, or that of next tokens."""
    found = group_loss_of(config)
    if found is not None:
        return GroupLossSum(found[0], shown=found[1], device=device)
    own = loss_of(config.train.loss)
    if own is None:
        return token_loss
    check = FirstLossCheck(f'train.loss = "{config.train.loss}"', tp)

    def checked(output: Tensor, batch: Microbatch, context: LossContext) -> Tensor:
        return check(own(output, batch, context))

    return checked


def build_stages(
    config: ResolvedConfig,
    mine: Sequence[int],
    groups: ProcessGroups,
    *,
    device: torch.device | str,
    initialize: bool = True,
) -> list[Stage]:
    """Build the chunks of some stages on one rank, in their order; see `build_chunks`."""
    stages, further = _stages(config)
    chunks: list[Stage] = []
    loss = _checked_loss(config, groups.tp, torch.device(device))
    options: ContextOptions = {
        "sequence_parallel": config.parallel.sequence_parallel,
        "cp_comm": config.parallel.cp_comm,
        "dtype": torch_dtype(config.train.dtype),
        "device": device,
        "seed": config.train.seed,
        "slots": SlotBuffers(config.moe.echo.num_spare_slots, config.num_slot_sets),
        "recompute": config.train.recomputed,
        "fp8": config.train.fp8 == "blockwise",
        "force_balanced": config.debug.force_balanced,
        "initialize": initialize,
        "lora": config.lora,
    }
    # In model order, so that the chunk with the embedding precedes those that share it.
    for stage in sorted(mine):
        if chunks:
            options["peers"] = chunks[0].moe_peers
        if config.model.factory is not None:
            own = StageContext(
                **vars(make_context(config.model, config.moe, groups, **options)),
                is_first=stage == 0,
                is_last=stage == len(stages) - 1,
                tied_weight=_embedding_weight(chunks),
            )
            chunks.append(OwnStage(config, stages[stage], own))
            continue
        chunks.append(
            GPTChunk(
                config.model,
                layers=stages[stage],
                has_embedding=stage == 0,
                has_head=stage == len(stages) - 1,
                groups=groups,
                moe=config.moe,
                tied_weight=_embedding_weight(chunks),
                mtp_layers=config.model.mtp_layers if stage == further else range(0),
                loss=loss,
                **options,
            )
        )
    built = dict(zip(sorted(mine), chunks, strict=True))
    return [built[stage] for stage in mine]


def in_model_order(pipeline: PipelineConfig, pp: Group) -> list[int]:
    """Return the indices of a rank's chunks in model order; ``pp`` is its pipeline group.

    In this order, ranks that hold the same stages have the same parameters, even if two copies of
    the model have these stages as different chunks.
    """
    mine = stages_of_ranks(pipeline, pp.size)[pp.position]
    return sorted(range(len(mine)), key=mine.__getitem__)


def _stages(config: ResolvedConfig) -> tuple[list[range], int | None]:
    try:
        return layers_of_stages(config), mtp_stage(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of ``train.dtype``."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _embedding_weight(chunks: Sequence[Stage]) -> nn.Parameter | None:
    weights = (chunk.embedding_weight for chunk in chunks)
    return next((weight for weight in weights if weight is not None), None)
