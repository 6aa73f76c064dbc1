"""Files of a model that are kept with a run, as an export writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint.model_files import (
    DTYPES_NAME,
    GENERATION_NAME,
    TOKEN_IDS,
    Files,
    files_of_model,
    model_folder,
    token_ids,
)
from megatrain.checkpoint.tokenizer_files import TOKENIZER_NAME, tokenizer_files
from megatrain.config import ModelConfig, MoEConfig
from megatrain.hf import config_to_hf, updated_config
from megatrain.hf_folder import CONFIG_NAME, TensorSpec, read_object
from megatrain.models.build import torch_dtype

# Entries of an imported config.json that no family's table has.
_KEPT_NAMES = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")


@dataclass(frozen=True, kw_only=True)
class KeptFiles:
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
    def of(cls, tokenizer: str, checkpoint: Path) -> KeptFiles:
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
