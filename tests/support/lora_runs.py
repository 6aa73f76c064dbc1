"""Checkpoints of runs with adapters whose values are a formula, without training."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.optim import ParamPiece
from megacore.parallel import ProcessGroups
from megatrain.checkpoint import TrainState, save_checkpoint
from megatrain.checkpoint.base_weights import BaseWeights
from megatrain.checkpoint.chunks import MAIN_PARAM
from megatrain.checkpoint.model_files import files_of_model, keep_files
from megatrain.config import Config, LoraConfig, resolve
from megatrain.config.lora import is_named
from megatrain.hf.import_hf import HFWeights, describe_params, open_folder
from megatrain.hf.settings import import_values
from megatrain.models.param_infos import GPTInfos


def formula(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values that differ between tensors, of the size of weights."""
    phase = zlib.crc32(name.encode()) % 1000
    values = 0.2 * torch.sin(torch.arange(math.prod(shape), dtype=torch.float32) * 1.7 + phase)
    return (values + 1.0 if name.endswith("lora_magnitude") else values).view(shape)


def save_lora_run(
    base: Path, out: Path, *, origin: Path | None = None, **lora: Any
) -> dict[str, Tensor]:
    """Save step 3 of a run with the adapters of a ``[lora]`` section; return its parameters.

    Args:
        base: Hugging Face folder.
        out: The folder of the run.
        origin: Folder of the same weights that the run names as its base.
        lora: The section.
    """
    origin = origin or base
    found = open_folder(base)
    config = Config.model_validate(
        {
            **import_values(found.model, found.moe),
            "lora": lora,
            "checkpoint": {"load_weights": str(origin)},
        }
    )
    section = LoraConfig.model_validate(lora)
    described = GPTInfos.of(found.model, found.moe, lora=section)
    infos = {
        name: info
        for layer in range(found.model.num_layers)
        for name, info in described.layer(layer).items()
        if ".lora_" in name
    }
    values = {name: formula(name, info.full_shape) for name, info in infos.items()}
    weights = HFWeights(found.files, found.config, found.model, found.moe)
    for info in describe_params(found.model, found.moe):
        saved = any(is_named(info.name, pattern) for pattern in section.modules_to_save)
        if saved or info.name.endswith("expert_bias"):
            infos[info.name] = info
            values[info.name] = weights[info.name].float().clone()
        if saved:
            values[info.name] += 0.5 * formula(info.name, info.full_shape)
            if info.name in ("embedding", "head"):
                values[info.name][found.model.vocab_size :] = 0.0  # padding
    pieces = [
        ParamPiece(
            info=infos[name], start=0, end=value.numel(), tensors={MAIN_PARAM: value.reshape(-1)}
        )
        for name, value in values.items()
    ]
    save_checkpoint(
        out / "checkpoints",
        pieces,
        state=TrainState(step=3, samples=3, optimizer={}, base=BaseWeights.of(origin).as_state()),
        config=resolve(config, 1, cuda=False).model_dump(),
        groups=ProcessGroups.single(),
    )
    keep_files(files_of_model(base), out)
    (out / "config.toml").touch()  # the folder of a run
    return values
