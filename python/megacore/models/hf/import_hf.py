"""Import of Hugging Face folders.

A folder has ``config.json`` and one or more ``*.safetensors`` files. If present,
``model.safetensors.index.json`` lists the relevant files. Nothing is downloaded, and the
``transformers`` package is not needed. Tensors are read one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megacore.config import ModelConfig, MoEConfig
from megacore.errors import MegacoreError
from megacore.models.gpt import GPTChunk
from megacore.models.hf.families import Family
from megacore.models.hf.files import TensorFiles, read_config
from megacore.models.hf.rows import Row, local_name, rows_of
from megacore.models.hf.settings import family_of, sections_from_hf
from megacore.models.shape import GPTShape
from megacore.parallel.params import ParamInfo, ShardPosition, shard
from megacore.parallel.process_groups import ProcessGroups

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Tensors(Protocol):
    """Tensors by name, such as `TensorFiles` or a dictionary."""

    def __getitem__(self, name: str, /) -> Tensor:
        """Return a tensor."""

    def __contains__(self, name: object, /) -> bool:
        """Check whether there is a tensor of this name."""

    def keys(self) -> Iterable[str]:
        """Return all names."""


@dataclass(frozen=True, kw_only=True)
class ImportedModel:
    """Model imported from a folder.

    Attributes:
        chunk: The model, or this rank's part of it.
        model: Its ``[model]`` section.
        moe: Its ``[moe]`` section.
    """

    chunk: GPTChunk
    model: ModelConfig
    moe: MoEConfig


class HFWeights:
    """Whole parameters of megacore, read from Hugging Face tensors one at a time.

    Args:
        tensors: The tensors.
        config: Content of ``config.json``.
        model: From `sections_from_hf`.
        moe: From `sections_from_hf`.

    Raises:
        MegacoreError: If a tensor is missing or unknown, or the head is tied to the embedding but
            differs from it.
    """

    def __init__(
        self,
        tensors: Tensors,
        config: Mapping[str, object],
        model: ModelConfig,
        moe: MoEConfig,
    ) -> None:
        self._tensors = tensors
        self._shape = GPTShape.from_config(model)
        self._infos = {info.name: info for info in describe_params(model, moe)}
        family = family_of(config)
        self._rows = {name: self._row(name, family, moe) for name in self._infos}
        used = {name for _, names in self._rows.values() for name in names}
        if model.tie_embeddings and HEAD in tensors:
            _check_equal(tensors, HEAD, EMBEDDING, _TIED_ADVICE)
            used.add(HEAD)
        for copy, name in copies_of(family, model):
            if copy in tensors:
                _check_equal(tensors, copy, self._rows[name][1][0], _COPY_ADVICE)
                used.add(copy)
        # Older folders contain rotation frequencies, which follow from the configuration.
        left = sorted(
            name for name in set(tensors.keys()) - used if not name.endswith("rotary_emb.inv_freq")
        )
        if left:
            raise MegacoreError(
                f"{len(left)} tensors have no place in a {family.model_type} model of megacore: "
                f"{', '.join(left[:5])}{', ...' if len(left) > 5 else ''}"
            )

    @property
    def infos(self) -> Mapping[str, ParamInfo]:
        """Descriptions of all parameters of the model by name, including checkpointed buffers."""
        return self._infos

    def __getitem__(self, name: str) -> Tensor:
        """Return a whole parameter, in the dtype of the tensors.

        Raises:
            MegacoreError: If a tensor has another shape than the configuration implies.
        """
        row, names = self._rows[name]
        parts = [self._tensors[theirs] for theirs in names]
        full = torch.empty(self._infos[name].full_shape, device="meta")
        expected = row.transform.split(full, self._shape)
        for theirs, part, wanted in zip(names, parts, expected, strict=True):
            if part.shape != wanted.shape:
                raise MegacoreError(
                    f"tensor {theirs} must have shape {tuple(wanted.shape)} according to "
                    f"config.json, got {tuple(part.shape)}"
                )
        return row.transform.join(parts, self._shape)

    def _row(self, name: str, family: Family, moe: MoEConfig) -> tuple[Row, list[str]]:
        candidates = list(rows_of(name, family.table, moe.num_experts))
        for row, names in candidates:
            missing = [theirs for theirs in names if theirs not in self._tensors]
            if not missing:
                return row, names
        first = next(theirs for theirs in candidates[0][1] if theirs not in self._tensors)
        layer, _ = local_name(name)
        advice = ""
        if layer is not None and layer >= self._shape.num_layers:
            advice = (
                "; if the folder has no layers for multi-token prediction, set "
                "num_nextn_predict_layers to 0 in config.json"
            )
        raise MegacoreError(f"there is no tensor {first}, which the model needs{advice}")


def copies_of(family: Family, model: ModelConfig) -> list[tuple[str, str]]:
    """Return the tensors that repeat a parameter, with the parameter's name."""
    head = "embedding" if model.tie_embeddings else "head"
    return [
        (pattern.format(layer=layer), head if name == "head" else name)
        for layer in model.mtp_layers
        for pattern, name in family.copies.items()
    ]


def import_hf(
    folder: str | Path,
    *,
    seq_length: int | None = None,
    groups: ProcessGroups | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> ImportedModel:
    """Build a model from a folder and load its weights.

    Args:
        folder: Folder with ``config.json`` and the weights: the files listed in
            ``model.safetensors.index.json``, else ``model.safetensors``, else all
            ``*.safetensors``.
        seq_length: Tokens per sequence. Default: the maximum of the model.
        groups: Process groups of this rank, which gets its shard of every layer; there is no
            pipeline. Default: one process.
        dtype: Number format of the parameters.
        device: Device of the parameters.

    Raises:
        MegacoreError: If a file is missing, unreadable or contradicts another one, or the model
            uses an unsupported feature.
    """
    groups = ProcessGroups.single() if groups is None else groups
    config = read_config(Path(folder))
    model, moe = sections_from_hf(config, seq_length=seq_length)
    weights = HFWeights(TensorFiles(Path(folder)), config, model, moe)
    chunk = GPTChunk(
        model,
        layers=range(model.num_layers),
        has_embedding=True,
        has_head=True,
        groups=groups,
        dtype=dtype,
        device=device,
        moe=moe,
    )
    fill_chunk(chunk, weights, groups)
    return ImportedModel(chunk=chunk, model=model, moe=moe)


@torch.no_grad()
def fill_chunk(chunk: GPTChunk, weights: HFWeights, groups: ProcessGroups) -> None:
    """Copy this rank's shards of whole parameters into its chunk.

    Args:
        chunk: Any part of the model in any layout.
        weights: Whole parameters by name; additional ones are ignored.
        groups: The groups of the chunk.
    """
    for info, values in (*chunk.param_infos(), *chunk.buffer_infos()):
        values.copy_(shard(weights[info.name], info, **vars(ShardPosition.of(info, groups))))


def describe_params(model: ModelConfig, moe: MoEConfig) -> list[ParamInfo]:
    """Describe all parameters and checkpointed buffers of a model, without building it.

    The order is that of the model: embedding, layers, final norm, head.
    """
    chunk = GPTChunk(
        # Tables of rotary angles have the length of the sequence; parameters do not depend on it.
        model.model_copy(update={"seq_length": 1}),
        layers=range(model.num_layers),
        has_embedding=True,
        has_head=True,
        groups=ProcessGroups.single(),
        device="meta",
        moe=moe,
    )
    infos = [info for info, _ in (*chunk.param_infos(), *chunk.buffer_infos())]
    # A stable sort: buffers go to their layer.
    ends = {"embedding": -1, "final_norm": model.mtp_layers.stop, "head": model.mtp_layers.stop}
    return sorted(infos, key=lambda info: ends.get(info.name, local_name(info.name)[0] or 0))


def _check_equal(tensors: Tensors, copy: str, original: str, advice: str) -> None:
    # Folders often have both although they are equal.
    first, second = tensors[original], tensors[copy]
    common = torch.promote_types(first.dtype, second.dtype)
    if first.shape != second.shape or not torch.equal(first.to(common), second.to(common)):
        raise MegacoreError(advice.format(copy=copy, original=original))


_TIED_ADVICE = (
    "tie_word_embeddings is true, but {copy} differs from {original}; to keep both, set it to "
    "false in config.json, else remove {copy} from the files"
)
_COPY_ADVICE = (
    "{copy} differs from {original}, but layers for multi-token prediction share it in megacore; "
    "remove {copy} from the files to use the shared one"
)
