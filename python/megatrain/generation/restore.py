"""Restoration of a complete model from any checkpoint or Hugging Face folder, in one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megacore.errors import CheckpointError
from megacore.parallel import ProcessGroups
from megatrain.checkpoint import StoredWeights
from megatrain.checkpoint.base_weights import check_base_option
from megatrain.checkpoint.model_files import tokenizer_beside
from megatrain.checkpoint.tokenizer_files import TOKENIZER_NAME
from megatrain.config import Config, DataConfig, config_from_values, resolve
from megatrain.data import Tokenizer, load_tokenizer
from megatrain.hf import import_hf
from megatrain.hf.merged_weights import open_merged
from megatrain.hf_folder import is_model_folder
from megatrain.models.gpt import GPTChunk


@dataclass(frozen=True, kw_only=True)
class RestoredModel:
    """Model, configuration and tokenizer of a checkpoint.

    Attributes:
        model: Embedding, all layers and head, float32, on one device.
        config: Configuration of the run that saved the checkpoint; defaults around the model of a
            Hugging Face folder.
        tokenizer: The tokenizer that the model was trained with; bytes if a Hugging Face folder has
            none.
    """

    model: GPTChunk
    config: Config
    tokenizer: Tokenizer


def restore_model(
    path: str | Path, *, device: torch.device | str = "cpu", base: str | Path | None = None
) -> RestoredModel:
    """Build the model of a checkpoint and load its weights.

    Args:
        path: A checkpoint folder, the folder of all checkpoints, a run's folder, or a Hugging Face
            folder.
        device: Device of the weights.
        base: Base of a checkpoint of adapters. Default: the place that the checkpoint names.

    Raises:
        CheckpointError: If the checkpoint or the base is missing, damaged or of another model, or
            a base is given for a whole model.
        DataError: If the tokenizer cannot be read.
        MegacoreError: If the Hugging Face model cannot be imported.
    """
    check_base_option(Path(path), base)
    if is_model_folder(Path(path)):
        return _restore_hf(Path(path), device)
    stored = StoredWeights(path, verified=False)
    config = config_from_values(stored.config, source=str(path))
    if config.model.factory is not None:
        raise CheckpointError(
            f'checkpoint {path} is of a model of your own, model.factory = "{config.model.factory}"'
            "; megacore generates text with its own GPT only"
        )
    tokenizer = tokenizer_beside(config.data.tokenizer, stored.folder)
    data = config.data.model_copy(update={"tokenizer": tokenizer})
    model = GPTChunk(
        config.model,
        layers=range(config.model.num_layers),
        has_embedding=True,
        has_head=True,
        groups=ProcessGroups.single(),
        device=device,
        # Without a capacity limit, a text does not depend on the other texts of its batch.
        moe=config.moe.model_copy(update={"dispatcher": "alltoall", "capacity_factor": None}),
        initialize=False,
    )
    with stored:
        if config.lora.is_on:
            merged = open_merged(stored, path=base, dtype=torch.float32)
            weights = merged.read(merged.names())
        else:
            weights = stored.read(stored.names())
        stored.verify()
    _fill(model, weights, path)
    return RestoredModel(
        model=model,
        config=config.model_copy(update={"data": data}),
        tokenizer=load_tokenizer(tokenizer),
    )


def _restore_hf(folder: Path, device: torch.device | str) -> RestoredModel:
    imported = import_hf(folder, device=device)
    has_tokenizer = (folder / TOKENIZER_NAME).is_file()
    tokenizer = str(folder / TOKENIZER_NAME) if has_tokenizer else "bytes"
    config = Config(model=imported.model, moe=imported.moe, data=DataConfig(tokenizer=tokenizer))
    return RestoredModel(
        model=imported.chunk,
        config=resolve(config, 1, cuda=False),
        tokenizer=load_tokenizer(tokenizer),
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
