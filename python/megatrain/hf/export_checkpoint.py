"""Export of a checkpoint as a Hugging Face model folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megacore.errors import CheckpointError, MegacoreError
from megatrain.checkpoint import StoredWeights
from megatrain.checkpoint.format import step_folder, step_folders
from megatrain.checkpoint.model_files import GENERATION_NAME, write_files
from megatrain.checkpoint.tokenizer_files import TOKENIZER_NAME
from megatrain.config import LoraConfig, config_from_values
from megatrain.files import describe_os_error, filled_folder
from megatrain.hf.export_hf import ParamSource
from megatrain.hf.export_plan import plan_export
from megatrain.hf.kept_files import KeptFiles
from megatrain.hf.merged_weights import open_merged
from megatrain.hf_folder import CONFIG_NAME, write_json, write_tensors

# Limit of `transformers` before version 5; files of this size can be copied anywhere.
MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """Result of an export.

    Attributes:
        checkpoint: The checkpoint that was read.
        config: Content of ``config.json``.
        files: The files of weights.
        dtype: Number format of most weights.
        num_params: Parameters of the model, without padding.
        has_tokenizer: Whether the folder has a tokenizer.
        notes: Differences from the imported files, one sentence each.
    """

    checkpoint: Path
    config: dict[str, Any]
    files: list[Path]
    dtype: str
    num_params: int
    has_tokenizer: bool
    notes: tuple[str, ...]


def export_checkpoint(
    path: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    step: int | None = None,
    family: str | None = None,
    averaged: bool = False,
    merged: bool = False,
    base: str | Path | None = None,
) -> ExportedModel:
    """Write the weights of a checkpoint of any layout as a Hugging Face folder, in this process.

    Writes ``*.safetensors`` (with an index if several), ``config.json``,
    ``generation_config.json`` and, if known, the tokenizer. The files of an imported model come
    back, changed only where the model has changed. Nothing is written before the model is known to
    fit a family, and ``config.json`` only when all files of the checkpoint were verified. Memory:
    blocks of 1 MB; for parameters whose values are reordered, or that several ranks wrote, one
    parameter.

    Args:
        path: A checkpoint folder, the folder of all checkpoints, or a run's folder.
        out: Output folder; must be new or empty.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``. Default: that of each tensor of the
            imported files; of a model from scratch, ``train.dtype``.
        max_shard_bytes: Limit for the tensors of one file, bytes.
        step: The checkpoint's step. Default: the latest.
        family: ``model_type`` to export as. Default: that of the import, else the first that has
            the model's shape.
        averaged: Write the moving average of the weights (``optimizer.ema_decay``).
        merged: Merge the adapters of a run with ``lora.rank`` into the weights of its base, in
            float32 with one rounding.
        base: Folder of the base, to merge. Default: where the run found it.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged, or has no moving average.
        MegacoreError: If no family has the model's shape, or ``out`` is not empty or not writable.
    """
    out = check_free(out)
    stored = open_stored(path, step=step, averaged=averaged)
    config = config_from_values(stored.config, source=str(stored.folder))
    _check_merged(config.lora, merged, stored.folder)
    kept = KeptFiles.of(config.data.tokenizer, stored.folder)
    plan = plan_export(config, kept, dtype=dtype, family=family)
    generation = kept.generation(plan.config)
    source: ParamSource = stored
    if merged:
        source = open_merged(stored, path=base, dtype=plan.merged_dtype)
    try:
        with stored, filled_folder(out), torch.no_grad():
            files = write_tensors(
                out,
                plan.tensors.specs,
                plan.tensors.blocks(source),
                max_shard_bytes=max_shard_bytes,
            )
            stored.verify()
            write_files(kept.tokenizer, out)
            if generation:
                write_json(out / GENERATION_NAME, generation)
            write_json(out / CONFIG_NAME, plan.config)
    except OSError as error:
        raise MegacoreError(f"cannot write to {out}: {describe_os_error(error)}") from error
    return ExportedModel(
        checkpoint=stored.folder,
        config=plan.config,
        files=files,
        dtype=plan.dtype,
        num_params=sum(math.prod(spec.shape) for spec in plan.tensors.specs),
        has_tokenizer=TOKENIZER_NAME in kept.tokenizer,
        notes=plan.notes,
    )


def _check_merged(lora: LoraConfig, merged: bool, folder: Path) -> None:
    if lora.is_on and not merged:
        raise MegacoreError(
            f"{folder} has adapters and no whole weights; add --merge for a model with merged "
            "weights, or --adapter for the files of PEFT"
        )
    if merged and not lora.is_on:
        raise MegacoreError(
            f"{folder} is not of a run with adapters (lora.rank is not set); leave --merge out"
        )


def check_free(out: str | Path) -> Path:
    """Check that an export can write into a folder.

    Raises:
        MegacoreError: If it is a file, or not empty.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "is not empty" if out.is_dir() else "is a file"
        raise MegacoreError(f"{out} {what}; name a new folder to export into")
    return out


def open_stored(path: str | Path, *, step: int | None, averaged: bool) -> StoredWeights:
    """Open the checkpoint of a step, not verified yet; arguments as `export_checkpoint`."""
    folder = path if step is None else _folder_of_step(Path(path), step)
    return StoredWeights(folder, verified=False, averaged=averaged)


def _folder_of_step(path: Path, step: int) -> Path:
    for directory in (path, path / "checkpoints"):
        if (directory / step_folder(step)).is_dir():
            return directory / step_folder(step)
    steps = [
        number for folder in (path, path / "checkpoints") for number, _ in step_folders(folder)
    ]
    known = ", ".join(map(str, steps)) or "none"
    raise CheckpointError(f"{path} has no checkpoint of step {step}; the steps are: {known}")
