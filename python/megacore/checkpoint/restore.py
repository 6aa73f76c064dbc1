"""Restoration of a complete model from a checkpoint of any layout, in one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megacore.checkpoint import load_full_weights
from megacore.config import Config, config_from_values
from megacore.data import Tokenizer, load_tokenizer
from megacore.errors import CheckpointError
from megacore.models.gpt import GPTChunk
from megacore.parallel import ProcessGroups


@dataclass(frozen=True, kw_only=True)
class RestoredModel:
    """Model, configuration and tokenizer of a checkpoint.

    Attributes:
        model: Embedding, all layers and head, float32, on one device.
        config: Configuration of the run that saved the checkpoint.
        tokenizer: The tokenizer that the model was trained with.
    """

    model: GPTChunk
    config: Config
    tokenizer: Tokenizer


def restore_model(path: str | Path, *, device: torch.device | str = "cpu") -> RestoredModel:
    """Build the model of a checkpoint and load its weights.

    Args:
        path: A checkpoint folder, the folder of all checkpoints, or a run's folder.
        device: Device of the weights.

    Raises:
        CheckpointError: If the checkpoint is missing, damaged or of another model.
        DataError: If the tokenizer cannot be read.
    """
    values, weights = load_full_weights(path)
    config = config_from_values(values, source=str(path))
    model = GPTChunk(
        config.model,
        layers=range(config.model.num_layers),
        has_embedding=True,
        has_head=True,
        groups=ProcessGroups.single(),
        device=device,
        # Without a capacity limit, a text does not depend on the other texts of its batch.
        moe=config.moe.model_copy(update={"dispatcher": "alltoall", "capacity_factor": None}),
    )
    _fill(model, weights, path)
    return RestoredModel(
        model=model, config=config, tokenizer=load_tokenizer(config.data.tokenizer)
    )


@torch.no_grad()
def _fill(model: GPTChunk, weights: dict[str, Tensor], path: str | Path) -> None:
    params: dict[str, Tensor] = {info.name: param for info, param in model.param_infos()}
    params |= {info.name: value for info, value in model.buffer_infos()}
    if params.keys() != weights.keys():
        odd = sorted(params.keys() ^ weights.keys())
        raise CheckpointError(
            f"checkpoint {path} and its own configuration disagree on {len(odd)} parameters, such "
            f"as {odd[0]}; it was written by another version of the model"
        )
    for name, param in params.items():
        if param.shape != weights[name].shape:
            raise CheckpointError(
                f"checkpoint {path} has {name} with shape {tuple(weights[name].shape)}, but its "
                f"configuration asks for {tuple(param.shape)}"
            )
        param.copy_(weights[name])
