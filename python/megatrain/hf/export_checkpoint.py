"""Export of a checkpoint as a Hugging Face model folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megacore.errors import CheckpointError, MegacoreError
from megatrain.checkpoint import StoredWeights
from megatrain.checkpoint.format import step_folder, step_folders
from megatrain.checkpoint.model_files import (
    DTYPES_NAME,
    GENERATION_NAME,
    TOKEN_IDS,
    Files,
    files_of_model,
    model_folder,
    token_ids,
    write_files,
)
from megatrain.checkpoint.tokenizer_files import TOKENIZER_NAME, tokenizer_files
from megatrain.config import ModelConfig, MoEConfig, config_from_values
from megatrain.files import describe_os_error, filled_folder
from megatrain.hf import HFTensors, config_to_hf, updated_config
from megatrain.hf_folder import (
    CONFIG_NAME,
    TensorSpec,
    read_object,
    write_json,
    write_tensors,
)
from megatrain.models.build import torch_dtype

# Limit of `transformers` before version 5; files of this size can be copied anywhere.
MAX_SHARD_BYTES = 5 * 10**9
# Entries of an imported config.json that no family's table has.
_KEPT_NAMES = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")


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

    Raises:
        CheckpointError: If the checkpoint is missing or damaged, or has no moving average.
        MegacoreError: If no family has the model's shape, or ``out`` is not empty or not writable.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "is not empty" if out.is_dir() else "is a file"
        raise MegacoreError(f"{out} {what}; name a new folder to export into")
    stored = StoredWeights(
        path if step is None else _folder_of_step(Path(path), step),
        verified=False,
        averaged=averaged,
    )
    config = config_from_values(stored.config, source=str(stored.folder))
    kept = _Kept.of(config.data.tokenizer, stored.folder)
    trained = config.train.dtype or "float32"
    hf_config, notes = kept.config(config.model, config.moe, family)
    tensors = HFTensors(
        hf_config["model_type"],
        config.model,
        config.moe,
        dtype=torch_dtype(dtype or kept.dtype or trained),
        others={} if dtype else kept.dtypes,
    )
    if dtype or not kept.dtype:
        dtype = dtype or trained
        stated = [name for name in ("dtype", "torch_dtype") if name in hf_config]
        hf_config |= dict.fromkeys(stated or ("dtype", "torch_dtype"), dtype)
        notes += kept.rounding(tensors.specs, dtype)
    elif trained == "float32" != kept.dtype:
        notes += (
            f"the weights are {kept.dtype}, as in the imported files, though train.dtype is "
            f"{trained}; --dtype {trained} keeps more digits",
        )
    generation = kept.generation(hf_config)
    try:
        with stored, filled_folder(out), torch.no_grad():
            files = write_tensors(
                out, tensors.specs, tensors.blocks(stored), max_shard_bytes=max_shard_bytes
            )
            stored.verify()
            write_files(kept.tokenizer, out)
            if generation:
                write_json(out / GENERATION_NAME, generation)
            write_json(out / CONFIG_NAME, hf_config)
    except OSError as error:
        raise MegacoreError(f"cannot write to {out}: {describe_os_error(error)}") from error
    return ExportedModel(
        checkpoint=stored.folder,
        config=hf_config,
        files=files,
        dtype=dtype or str(kept.dtype),
        num_params=sum(math.prod(spec.shape) for spec in tensors.specs),
        has_tokenizer=TOKENIZER_NAME in kept.tokenizer,
        notes=notes,
    )


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """Files of the model that are kept with the run.

    Attributes:
        original: The imported ``config.json``; ``None`` for a model from scratch.
        sampling: ``generation_config.json``; empty if there is none.
        dtype: Number format of the imported files.
        dtypes: Number formats of tensors that have another one.
        tokenizer: The tokenizer's files.
    """

    original: dict[str, Any] | None
    sampling: dict[str, Any]
    dtype: str | None
    dtypes: dict[str, torch.dtype]
    tokenizer: Files

    @classmethod
    def of(cls, tokenizer: str, checkpoint: Path) -> _Kept:
        """Read the files; the tokenizer may still be where the run found it."""
        folder = model_folder(checkpoint)
        files = {} if folder is None else dict(files_of_model(folder))
        read = {
            name: read_object(path) if isinstance(path := files.pop(name, None), Path) else None
            for name in (CONFIG_NAME, GENERATION_NAME, DTYPES_NAME)
        }
        dtypes = read[DTYPES_NAME] or {"default": None, "tensors": {}}
        return cls(
            original=read[CONFIG_NAME],
            sampling=read[GENERATION_NAME] or {},
            dtype=dtypes["default"],
            dtypes={name: torch_dtype(dtype) for name, dtype in dtypes["tensors"].items()},
            tokenizer=files or tokenizer_files(tokenizer),
        )

    def config(
        self, model: ModelConfig, moe: MoEConfig, family: str | None
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return ``config.json``, and notes on its changes."""
        original = self.original
        if original is None:
            return config_to_hf(model, moe, family=family) | self.token_ids(), ()
        kind, notes = original["model_type"], []
        found = updated_config(original, model, moe) if family in (None, kind) else None
        longest = original.get("max_position_embeddings")
        if found is None:
            found = config_to_hf(model, moe, family=family)
            found |= {name: original[name] for name in _KEPT_NAMES if name in original}
            if isinstance(longest, int) and model.rope_scaling.type != "dynamic":
                found["max_position_embeddings"] = max(longest, model.seq_length)
            if family is None:
                notes.append(f"the model is not a {kind} any more, so config.json is new")
        if found.get("max_position_embeddings") != longest:
            notes.append(
                f"max_position_embeddings = {found['max_position_embeddings']}, the length of "
                f"training, instead of {longest}"
            )
        return found, tuple(notes)

    def generation(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``generation_config.json``; empty if ``config.json`` states everything."""
        if self.original is None:
            # Without an entry, `transformers` would use the ids of the family's first model.
            base = self.sampling or {"_from_model_config": True, **dict.fromkeys(TOKEN_IDS)}
            return base | _known(self.token_ids())
        stated = _known({name: config.get(name) for name in TOKEN_IDS})
        if "eos_token_id" not in stated:
            stated = _known(self.token_ids()) | stated
        elif not self.sampling:
            return {}
        base = self.sampling
        if not base and "eos_token_id" in stated:
            base = {"_from_model_config": True}
        missing = [name for name in stated if base and base.get(name) is None]
        return base | {name: stated[name] for name in missing}

    def token_ids(self) -> dict[str, Any]:
        """Return the ids that ``generation_config.json``, else the tokenizer, states."""
        tokenizer, ids = self.tokenizer.get(TOKENIZER_NAME), dict[str, Any].fromkeys(TOKEN_IDS)
        if self.sampling.get("eos_token_id") is None and isinstance(tokenizer, Path):
            ids |= token_ids(tokenizer.parent)
        return ids | _known({name: self.sampling.get(name) for name in TOKEN_IDS})

    def rounding(self, specs: Sequence[TensorSpec], dtype: str) -> tuple[str, ...]:
        """Return a note on tensors that had a wider format than most of the imported files."""
        rounded = [
            spec.name
            for spec in specs
            if spec.dtype != torch.float32 and self.dtypes.get(spec.name) == torch.float32
        ]
        if not rounded:
            return ()
        return (
            f"{len(rounded)} tensors, such as {rounded[0]}, were float32 in the imported files and "
            f"are rounded to {dtype}",
        )


def _known(ids: Mapping[str, Any]) -> dict[str, Any]:
    return {name: token for name, token in ids.items() if token is not None}


def _folder_of_step(path: Path, step: int) -> Path:
    for directory in (path, path / "checkpoints"):
        if (directory / step_folder(step)).is_dir():
            return directory / step_folder(step)
    steps = [
        number for folder in (path, path / "checkpoints") for number, _ in step_folders(folder)
    ]
    known = ", ".join(map(str, steps)) or "none"
    raise CheckpointError(f"{path} has no checkpoint of step {step}; the steps are: {known}")
