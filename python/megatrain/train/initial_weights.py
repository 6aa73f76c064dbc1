"""Start from the weights of a Hugging Face folder or a checkpoint, with a fresh optimizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megacore.errors import MegacoreError
from megacore.optim import ParamPiece
from megacore.parallel import ProcessGroups
from megacore.parallel.params import ShardPosition
from megatrain.checkpoint import load_checkpoint
from megatrain.checkpoint.agreement import on_every_rank
from megatrain.checkpoint.chunks import MAIN_PARAM
from megatrain.config import ModelConfig, MoEConfig
from megatrain.config.lora import is_adapter
from megatrain.hf import HFWeights
from megatrain.hf.import_hf import open_folder
from megatrain.hf.settings import differences
from megatrain.hf_folder import is_model_folder
from megatrain.train.trainer import Trainer


def load_initial_weights(trainer: Trainer, path: str | Path) -> tuple[str, ...]:
    """Fill the weights of a new trainer; the optimizer state stays new. Collective.

    Each rank reads its own shards, one parameter at a time.

    Args:
        trainer: A trainer that has not trained.
        path: Hugging Face folder, checkpoint folder, folder of checkpoints, or a run's folder.

    Returns:
        Notes on settings that differ from those of the Hugging Face model.

    Raises:
        MegacoreError: On every rank, if there are no weights, or they are of another shape.
    """
    path, groups = Path(path), trainer.groups
    pieces = [
        replace(piece, tensors={MAIN_PARAM: piece.tensors[MAIN_PARAM]})
        for piece in trainer.pieces()
        if MAIN_PARAM in piece.tensors and not is_adapter(piece.info.name)
    ]
    notes: tuple[str, ...] = ()
    model, moe = trainer.config.model, trainer.config.moe
    if is_model_folder(path):
        notes = on_every_rank(
            lambda: _fill_from_hf(path, pieces, groups, model=model, moe=moe), groups
        )
    else:
        load_checkpoint(path, pieces, groups=groups, config=trainer.config.model_dump())
    trainer.optimizer.finish_load(trainer.optimizer.step_count)
    if trainer.average is not None:
        trainer.average.restart()
    return notes


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
