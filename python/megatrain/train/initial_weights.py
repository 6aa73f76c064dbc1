"""Start from the weights of a Hugging Face folder or a checkpoint, with a fresh optimizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from megacore.errors import CheckpointError, MegacoreError
from megacore.optim import ParamPiece
from megacore.parallel import ProcessGroups
from megacore.parallel.params import ShardPosition
from megatrain.checkpoint import load_checkpoint
from megatrain.checkpoint.agreement import on_every_rank, on_rank_0
from megatrain.checkpoint.base_weights import BaseWeights, adapters_in, find_base
from megatrain.checkpoint.chunks import MAIN_PARAM
from megatrain.checkpoint.format import read_index
from megatrain.config import LoraConfig, ModelConfig, MoEConfig
from megatrain.hf import HFWeights
from megatrain.hf.import_hf import open_folder
from megatrain.hf.settings import differences
from megatrain.hf_folder import is_model_folder
from megatrain.models.adapters import Adapter
from megatrain.train.trainer import Trainer, without_state


def load_initial_weights(trainer: Trainer, path: str | Path) -> tuple[str, ...]:
    """Fill the weights of a new trainer; the optimizer state stays new. Collective.

    Each rank reads its own shards, one parameter at a time. With adapters, these are loaded if
    ``path`` has any, and their base before, unless `load_base` has loaded it.

    Args:
        trainer: A trainer that has not trained.
        path: Hugging Face folder, checkpoint folder, folder of checkpoints, or a run's folder.

    Returns:
        Notes on settings that differ from those of the Hugging Face model, or of the adapters.

    Raises:
        MegacoreError: On every rank, if there are no weights, or they are of another shape.
    """
    notes: tuple[str, ...] = ()
    adapters = on_every_rank(lambda: adapters_in(Path(path)), trainer.groups)
    if trainer.config.lora.is_on:
        if trainer.base is None:
            _, notes = load_base(trainer, path, adapters=None)
        if adapters is not None:
            pieces = [without_state(piece) for piece in trainer.pieces() if _has_values(piece)]
            config = trainer.config.model_dump()
            load_checkpoint(adapters, pieces, groups=trainer.groups, config=config)
            notes = (*notes, *_scale_notes(adapters, trainer.config.lora))
    elif adapters is not None:
        raise CheckpointError(
            f"checkpoint {adapters} has adapters only; set [lora] as in their run, or merge them "
            "into their base first (megacore export-hf --merge)"
        )
    else:
        notes = _fill_weights(trainer, Path(path))
    _finish(trainer)
    return notes


def load_base(
    trainer: Trainer, given: str | Path | None, *, adapters: Path | None
) -> tuple[BaseWeights, tuple[str, ...]]:
    """Fill the weights that adapters are trained on. Collective.

    Args:
        trainer: A trainer that has not trained.
        given: As ``checkpoint.load_weights``; ``None`` for the base of ``adapters``.
        adapters: Checkpoint that the run continues from, if there is one.

    Returns:
        The weights, and notes as of `load_initial_weights`.

    Raises:
        MegacoreError: On every rank, if there are no weights, they are of another shape, or not
            those that the adapters were trained on.
    """
    base = on_rank_0(lambda: find_base(given, adapters), trainer.groups)
    notes = _fill_weights(trainer, Path(base.path))
    _finish(trainer)
    trainer.optimizer.finish_param_gather()
    for chunk in trainer.chunks:
        for module in chunk.modules():
            if isinstance(module, Adapter):
                module.start_magnitudes()
    return base, notes


def _scale_notes(adapters: Path, ours: LoraConfig) -> tuple[str, ...]:
    """Return a note if loaded adapters get another factor than in their run: no shape shows it."""
    theirs = LoraConfig.model_validate(read_index(adapters).config["lora"])
    if theirs.scale == ours.scale:
        return ()
    return (
        f"the adapters of {adapters} were trained with a factor of {theirs.scale:g}, and get one "
        f"of {ours.scale:g} here: set lora.alpha and lora.rs as in their run to start from the "
        "same model",
    )


def _has_values(piece: ParamPiece) -> bool:
    return MAIN_PARAM in piece.tensors


def _fill_weights(trainer: Trainer, path: Path) -> tuple[str, ...]:
    """Fill all weights but adapters."""
    config, groups = trainer.config, trainer.groups
    if is_model_folder(path):
        fill = partial(
            _fill_from_hf, path, trainer.weights(), groups, model=config.model, moe=config.moe
        )
        return on_every_rank(fill, groups)
    load_checkpoint(path, trainer.weights(), groups=groups, config=config.model_dump())
    return ()


def _finish(trainer: Trainer) -> None:
    trainer.optimizer.finish_load(trainer.optimizer.step_count)
    if trainer.average is not None:
        trainer.average.restart()


@torch.no_grad()
def _fill_from_hf(
    folder: Path,
    pieces: list[ParamPiece],
    groups: ProcessGroups,
    *,
    model: ModelConfig,
    moe: MoEConfig,
) -> tuple[str, ...]:
    if model.factory is not None:
        raise MegacoreError(
            f"checkpoint.load_weights = {folder} is a Hugging Face model, which fits megacore's "
            f'GPT only, not model.factory = "{model.factory}"; use a checkpoint of that model'
        )
    found = open_folder(folder, seq_length=model.seq_length)
    different = differences((found.model, found.moe), (model, moe))
    try:
        weights = HFWeights(found.files, found.config, model, moe)
        _fill(pieces, weights, groups)
    except MegacoreError as error:
        # The cause is rather a setting than a file.
        reason = f"; it has {', '.join(different)}" if different else ""
        raise MegacoreError(f"checkpoint.load_weights = {folder}: {error}{reason}") from error
    kept = (f"{folder} has {text}: the run uses the latter" for text in different)
    return (*(f"{folder}: {note}" for note in found.notes), *kept)


def _fill(pieces: list[ParamPiece], weights: HFWeights, groups: ProcessGroups) -> None:
    name, local = "", torch.empty(0)
    for piece in pieces:
        info = piece.info
        if info.name != name:
            name = info.name
            local = weights.shard(name, ShardPosition.of(info, groups)).reshape(-1)
        piece.tensors[MAIN_PARAM].copy_(local[piece.start : piece.end])
