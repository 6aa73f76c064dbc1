"""Export of a checkpoint as a Hugging Face model folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megacore.checkpoint import StoredWeights
from megacore.checkpoint.format import step_folder, step_folders
from megacore.checkpoint.tokenizer_files import (
    TOKENIZER_NAME,
    tokenizer_files,
    with_tokenizer_beside,
)
from megacore.config import config_from_values
from megacore.errors import CheckpointError, MegacoreError
from megacore.files import describe_os_error, filled_folder
from megacore.models.build import torch_dtype
from megacore.models.hf import HFTensors, config_to_hf
from megacore.models.hf.files import CONFIG_NAME, write_json, write_tensors

# Limit of `transformers` before version 5; files of this size can be copied anywhere.
MAX_SHARD_BYTES = 5 * 10**9
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """Result of an export.

    Attributes:
        checkpoint: The checkpoint that was read.
        config: Content of ``config.json``.
        files: The files of weights.
        num_params: Parameters of the model, without padding.
        has_tokenizer: Whether the folder has a tokenizer.
    """

    checkpoint: Path
    config: dict[str, Any]
    files: list[Path]
    num_params: int
    has_tokenizer: bool


def export_checkpoint(
    path: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    step: int | None = None,
    family: str | None = None,
) -> ExportedModel:
    """Write the weights of a checkpoint of any layout as a Hugging Face folder, in this process.

    Writes ``*.safetensors`` (with an index if several), ``config.json``,
    ``generation_config.json`` and, if known, the tokenizer. Nothing is written before the model is
    known to fit a family, and ``config.json`` only when all files of the checkpoint were verified.
    Memory: blocks of 1 MB; for parameters whose values are reordered, or that several ranks wrote,
    one parameter.

    Args:
        path: A checkpoint folder, the folder of all checkpoints, or a run's folder.
        out: Output folder; must be new or empty.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``. Default: ``train.dtype`` of the run.
        max_shard_bytes: Limit for the tensors of one file, bytes.
        step: The checkpoint's step. Default: the latest.
        family: ``model_type`` to export as. Default: the first that has the model's shape.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged.
        MegacoreError: If no family has the model's shape, or ``out`` is not empty or not writable.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "is not empty" if out.is_dir() else "is a file"
        raise MegacoreError(f"{out} {what}; name a new folder to export into")
    stored = StoredWeights(
        path if step is None else _folder_of_step(Path(path), step), verified=False
    )
    config = config_from_values(stored.config, source=str(stored.folder))
    dtype = dtype or config.train.dtype
    hf_config = config_to_hf(config.model, config.moe, family=family)
    tensors = HFTensors(hf_config["model_type"], config.model, config.moe, dtype=torch_dtype(dtype))
    tokenizer = tokenizer_files(with_tokenizer_beside(config, stored.folder).data.tokenizer)
    generation = _generation_config(tokenizer.get("generation_config.json"))
    hf_config |= {name: generation.get(name) for name in _TOKEN_IDS}
    hf_config |= {"dtype": dtype, "torch_dtype": dtype}

    try:
        with stored, filled_folder(out), torch.no_grad():
            files = write_tensors(
                out, tensors.specs, tensors.parts(stored), max_shard_bytes=max_shard_bytes
            )
            stored.verify()
            for name, source in tokenizer.items():
                shutil.copyfile(source, out / name)
            write_json(out / "generation_config.json", generation)
            write_json(out / CONFIG_NAME, hf_config)
    except OSError as error:
        raise MegacoreError(f"cannot write to {out}: {describe_os_error(error)}") from error
    return ExportedModel(
        checkpoint=stored.folder,
        config=hf_config,
        files=files,
        num_params=sum(spec.num_bytes // spec.dtype.itemsize for spec in tensors.specs),
        has_tokenizer=TOKENIZER_NAME in tokenizer,
    )


def _folder_of_step(path: Path, step: int) -> Path:
    for directory in (path, path / "checkpoints"):
        if (directory / step_folder(step)).is_dir():
            return directory / step_folder(step)
    steps = [
        number for folder in (path, path / "checkpoints") for number, _ in step_folders(folder)
    ]
    known = ", ".join(map(str, steps)) or "none"
    raise CheckpointError(f"{path} has no checkpoint of step {step}; the steps are: {known}")


def _generation_config(path: Path | None) -> Mapping[str, Any]:
    """Return the generation settings of the model that was imported, or the defaults."""
    if path is not None:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    # Without these entries, `transformers` would use the token ids of the family's first model.
    return {"_from_model_config": True, **dict.fromkeys(_TOKEN_IDS)}
