"""Import of Hugging Face folders.

A folder has ``config.json`` and one or more ``*.safetensors`` files. If present,
``model.safetensors.index.json`` lists the relevant files. Nothing is downloaded, and the
``transformers`` package is not needed. Tensors are read one parameter at a time.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megacore.errors import MegacoreError
from megacore.parallel.param_info import ParamInfo
from megacore.parallel.params import ShardPosition, shard
from megacore.parallel.process_groups import ProcessGroups
from megatrain.config import ModelConfig, MoEConfig
from megatrain.hf.common_keys import MTP_COUNT
from megatrain.hf.entries import family_of, without_entries
from megatrain.hf.family import Family
from megatrain.hf.rows import TENSORS, Row, Run, local_name, rows_of, runs_of
from megatrain.hf.settings import sections_from_hf
from megatrain.hf_folder import TensorFiles, read_blocks, read_config
from megatrain.hf_quantized import QuantizedFiles, open_tensors
from megatrain.models.gpt import GPTChunk
from megatrain.models.shape import GPTShape

# Tensors of older folders that follow from the configuration: frequencies and masks.
DERIVED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
HEAD = "lm_head.weight"
# Parameters whose last rows may be padding.
_PADDED = ("embedding", "head")
_HALVES = (torch.bfloat16, torch.float16)


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
        self._placed: dict[str, list[tuple[Run, str]] | None] = {}
        self._last: tuple[str, Tensor] | None = None
        self._shape = GPTShape.from_config(model)
        self._infos = {info.name: info for info in describe_params(model, moe)}
        family = family_of(config)
        self._rows = {name: self._row(name, family, moe) for name in self._infos}
        used = {name for _, names in self._rows.values() for name in names}
        if model.tie_embeddings and HEAD in tensors:
            _check_equal(tensors, HEAD, self._rows["embedding"][1][0], _TIED_ADVICE)
            used.add(HEAD)
        for copy, name in copies_of(family, model):
            if copy in tensors:
                _check_equal(tensors, copy, self._rows[name][1][0], _COPY_ADVICE)
                used.add(copy)
        left = sorted(name for name in set(tensors.keys()) - used if not name.endswith(DERIVED))
        if left:
            for name in sorted(used):
                _dtype_of(tensors, name)  # the others may be scales of an unsupported format
            raise MegacoreError(
                f"{len(left)} tensor{'s have' if len(left) > 1 else ' has'} no place in a "
                f"{family.model_type} model of megacore: "
                f"{', '.join(left[:5])}{', ...' if len(left) > 5 else ''}"
            )

    @property
    def infos(self) -> Mapping[str, ParamInfo]:
        """Descriptions of all parameters of the model by name, including checkpointed buffers."""
        return self._infos

    def num_params(self, *, only_mtp: bool = False) -> int:
        """Count the parameters and checkpointed buffers, without padding of the vocabulary.

        Args:
            only_mtp: Whether to count only those of layers for multi-token prediction.
        """
        total, first = 0, self._shape.num_layers if only_mtp else -1
        for name, (row, _) in self._rows.items():
            layer, _ = local_name(name)
            if (-1 if layer is None else layer) < first:
                continue
            whole = torch.empty(self._infos[name].full_shape, device="meta")
            total += sum(part.numel() for part in row.transform.split(whole, self._shape))
        return total

    def __getitem__(self, name: str) -> Tensor:
        """Return a whole parameter; see `shard`."""
        return self.shard(name, ShardPosition())

    def shard(self, name: str, position: ShardPosition) -> Tensor:
        """Return a shard of a parameter, in the dtype of its first tensor; see `read_into`."""
        info, (_, names) = self._infos[name], self._rows[name]
        shape = info.local_shape(position.tp_size, ep_size=position.ep_size)
        values = torch.empty(shape, dtype=_dtype_of(self._tensors, names[0]))
        self.read_into(values, name, position)
        return values

    def dtype(self, name: str) -> torch.dtype:
        """Return the smallest of float32, bfloat16 and float16 that has all values of a parameter.

        The values of float64 tensors are rounded to float32.
        """
        dtypes = {_dtype_of(self._tensors, theirs) for theirs in self._rows[name][1]}
        return next((half for half in _HALVES if dtypes == {half}), torch.float32)

    @torch.no_grad()
    def blocks(self, name: str, start: int, end: int) -> Iterator[Tensor]:
        """Yield a range of a flattened parameter in consecutive blocks, in `dtype`.

        A block is valid until the next one.

        Raises:
            MegacoreError: As `read_into`.
        """
        if self._runs(name) is None:
            if self._last is None or self._last[0] != name:
                self._last = None  # its memory is free before the next parameter is read
                info, dtype = self._infos[name], self.dtype(name)
                self._last = name, torch.empty(info.full_shape, dtype=dtype)
                self.read_into(self._last[1], name, ShardPosition())
            yield self._last[1].view(-1)[start:end]
            return
        yield from read_blocks(
            [(start, end)],
            self.dtype(name),
            lambda first, block: self._read_runs(block, name, first),
        )

    def has_ranges(self, name: str) -> bool:
        """Check whether ranges of a flattened parameter can be read without the rest of it."""
        return self._runs(name) is not None

    @torch.no_grad()
    def read_range(self, name: str, start: int, into: Tensor) -> None:
        """Read a range of a flattened parameter that has ranges into a contiguous tensor."""
        self._read_runs(into, name, start)

    def read_param(self, name: str) -> Tensor:
        """Read a whole parameter, in `dtype`."""
        values = torch.empty(self._infos[name].full_shape, dtype=self.dtype(name))
        self.read_into(values, name, ShardPosition())
        return values

    def read_part(self, name: str, first: int, last: int) -> Tensor:
        """Read the elements ``[first, last)`` of the first dimension of a parameter, in `dtype`.

        Without ranges, memory holds the whole parameter.
        """
        shape = self._infos[name].full_shape
        if last - first == shape[0] or not self.has_ranges(name):
            return self.read_param(name)[first:last]
        values = torch.empty((last - first, *shape[1:]), dtype=self.dtype(name))
        self.read_range(name, first * math.prod(shape[1:]), values.view(-1))
        return values

    def not_finite(self, name: str) -> str | None:
        """Return the first tensor of a parameter with a NaN or infinite value, or ``None``."""
        for theirs in self._rows[name][1]:
            if not torch.isfinite(self._tensors[theirs]).all():
                return theirs
        return None

    @torch.no_grad()
    def read_into(self, values: Tensor, name: str, position: ShardPosition) -> None:
        """Fill a shard of a parameter; only its values are read, most of them without a copy.

        Raises:
            MegacoreError: If a tensor has another shape than the configuration implies.
        """
        info, (row, names) = self._infos[name], self._rows[name]
        self._check_shapes(info, row, names)
        is_whole = tuple(values.shape) == info.full_shape
        if is_whole and values.is_contiguous() and values.is_cpu and self._runs(name) is not None:
            self._read_runs(values.view(-1), name, 0)
            return
        tp = (info.tp_dim, position.tp_position, position.tp_size)
        ep = (info.ep_dim, position.ep_position, position.ep_size)
        dims, shape = row.transform.dims, self._shape
        splits = [(dim, at, size) for dim, at, size in (tp, ep) if dim is not None and size > 1]
        if not all(dim in dims for dim, _, _ in splits):
            values.copy_(shard(self[name], info, **vars(position)))
            return
        ranges: dict[int, tuple[int, int, int]] = {}
        for dim, at, size in splits:
            if dims[dim] == TENSORS:
                count = len(names) // size
                names = names[at * count : (at + 1) * count]
            else:
                ranges[dims[dim]] = (info.full_shape[dim], at, size)
        if not info.expert:
            shape = shape.shard(position.tp_size)
        if not _splits_to_views(row, values.shape, shape):
            tensors = [self._read(theirs, ranges) for theirs in names]
            values.copy_(row.transform.join(tensors, shape))
            return
        if info.name in _PADDED and self._shape.vocab < self._shape.padded_vocab:
            values.zero_()
        for theirs, target in zip(names, row.transform.split(values, shape), strict=True):
            self._read(theirs, ranges, into=target)

    def _runs(self, name: str) -> list[tuple[Run, str]] | None:
        """Return the runs of a parameter in its order, with their tensors; see `runs_of`."""
        if name not in self._placed:
            info, (row, names) = self._infos[name], self._rows[name]
            self._check_shapes(info, row, names)
            runs = runs_of(row.transform, info.full_shape, self._shape)
            self._placed[name] = None
            if runs is not None:
                placed = zip(names, runs, strict=True)
                self._placed[name] = sorted(
                    ((run, theirs) for theirs, each in placed for run in each), key=_first_of
                )
        return self._placed[name]

    def _read_runs(self, values: Tensor, name: str, start: int) -> None:
        """Fill ``values`` with the elements of a flattened parameter from ``start`` on."""
        runs, end = self._runs(name), start + values.numel()
        assert runs is not None
        if name in _PADDED and self._shape.vocab < self._shape.padded_vocab:
            values.zero_()
        number = max(0, bisect_right(runs, start, key=_first_of) - 1)
        for run, theirs in itertools.islice(runs, number, None):
            if run.ours >= end:
                break
            first, last = max(start, run.ours), min(end, run.ours + run.numel)
            if first >= last:
                continue  # padding
            part = values[first - start : last - start]
            if isinstance(self._tensors, TensorFiles):
                self._tensors.elements(theirs, run.theirs + first - run.ours, part)
            else:
                flat = self._tensors[theirs].reshape(-1)
                part.copy_(flat[run.theirs + first - run.ours :][: last - first])

    def check(self) -> None:
        """Check the shapes and dtypes of all tensors, without reading their values.

        Raises:
            MegacoreError: As `shard`.
        """
        for name, (row, names) in self._rows.items():
            self._check_shapes(self._infos[name], row, names)
            for theirs in names:
                _dtype_of(self._tensors, theirs)

    def _read(
        self,
        name: str,
        splits: Mapping[int, tuple[int, int, int]],
        *,
        into: Tensor | None = None,
    ) -> Tensor:
        """Read the part of a tensor; ``splits`` has the parameter's size, the index and number.

        A part of the padded vocabulary may have fewer rows than ``into``.
        """
        theirs = _shape_of(self._tensors, name)
        ranges = {}
        for dim, (ours, at, size) in splits.items():
            # A tensor has several rows for one of the parameter, or fewer without padding.
            unit = max(1, theirs[dim] // ours)
            first, stop = (unit * (index * ours // size) for index in (at, at + 1))
            ranges[dim] = (min(first, theirs[dim]), min(stop, theirs[dim]))
        if into is not None and 0 in ranges:
            into = into[: ranges[0][1] - ranges[0][0]]
        if isinstance(self._tensors, TensorFiles):
            return self._tensors.part(name, ranges, into=into)
        whole = (slice(*ranges.get(dim, (0, size))) for dim, size in enumerate(theirs))
        part = self._tensors[name][tuple(whole)]
        return part if into is None else into.copy_(part)

    def _check_shapes(self, info: ParamInfo, row: Row, names: list[str]) -> None:
        full = torch.empty(info.full_shape, device="meta")
        for name, wanted in zip(names, row.transform.split(full, self._shape), strict=True):
            found = _shape_of(self._tensors, name)
            if found != tuple(wanted.shape):
                raise MegacoreError(
                    f"tensor {name} must have shape {tuple(wanted.shape)} according to "
                    f"config.json, got {found}"
                )

    def _row(self, name: str, family: Family, moe: MoEConfig) -> tuple[Row, list[str]]:
        candidates = list(rows_of(name, family.table, moe.num_experts))
        for row, names in candidates:
            missing = [theirs for theirs in names if theirs not in self._tensors]
            if not missing:
                return row, names
        first = next(theirs for theirs in candidates[0][1] if theirs not in self._tensors)
        advice = ""
        if f"{first}_blocks" in self._tensors:
            advice = (
                f", but {first}_blocks in MXFP4, which needs quantization_config with quant_method "
                "mxfp4 in config.json"
            )
        raise MegacoreError(f"there is no tensor {first}, which the model needs{advice}")


def _first_of(placed: tuple[Run, str]) -> int:
    return placed[0].ours


def _shape_of(tensors: Tensors, name: str) -> tuple[int, ...]:
    return tensors.shape(name) if isinstance(tensors, TensorFiles) else tuple(tensors[name].shape)


def _splits_to_views(row: Row, shape: torch.Size, sizes: GPTShape) -> bool:
    whole = torch.empty(shape, device="meta")
    parts = row.transform.split(whole, sizes)
    return all(part is whole or part._base is whole for part in parts)


def _dtype_of(tensors: Tensors, name: str) -> torch.dtype:
    return tensors.dtype_of(name) if isinstance(tensors, TensorFiles) else tensors[name].dtype


def copies_of(family: Family, model: ModelConfig) -> list[tuple[str, str]]:
    """Return the tensors that repeat a parameter, with the parameter's name."""
    head = "embedding" if model.tie_embeddings else "head"
    return [
        (pattern.format(layer=layer), head if name == "head" else name)
        for layer in model.mtp_layers
        for pattern, name in family.copies.items()
    ]


@dataclass(frozen=True, kw_only=True)
class HFFolder:
    """Model in a folder: its description, and its tensors, which are not read yet.

    Attributes:
        config: Content of ``config.json``, without ignored entries and absent layers.
        model: Its ``[model]`` section.
        moe: Its ``[moe]`` section.
        files: The tensors.
        notes: Differences between the files and what is read from them, one sentence each.
        absent_layers: Layers for multi-token prediction that ``config.json`` counts, but of which
            the files have no tensors: `transformers` neither loads nor saves such layers.
    """

    config: Mapping[str, Any]
    model: ModelConfig
    moe: MoEConfig
    files: TensorFiles
    notes: tuple[str, ...] = ()
    absent_layers: int = 0


def open_folder(
    folder: str | Path, *, seq_length: int | None = None, ignore: Collection[str] = ()
) -> HFFolder:
    """Read ``config.json`` and find the tensors.

    Args:
        folder: As for `import_hf`.
        seq_length: Tokens per sequence. Default: the maximum of the model.
        ignore: Names of unknown entries of ``config.json`` without effect.

    Raises:
        MegacoreError: If the model or its files are not supported, the former first.
    """
    folder = Path(folder)
    config = without_entries(read_config(folder), ignore)
    model, moe = sections_from_hf(config, seq_length=seq_length)
    files = open_tensors(folder, config)
    notes: tuple[str, ...] = (files.note(),) if isinstance(files, QuantizedFiles) else ()
    count = absent_layers(model, files.keys())
    if count:
        config |= {MTP_COUNT: 0}
        model, moe = sections_from_hf(config, seq_length=seq_length)
        layers = "1 layer" if count == 1 else f"{count} layers"
        notes += (
            f"imported without {layers} for multi-token prediction, which {MTP_COUNT} in "
            "config.json counts, but of which the files have no tensors",
        )
    return HFFolder(
        config=config, model=model, moe=moe, files=files, notes=notes, absent_layers=count
    )


def absent_layers(model: ModelConfig, names: Iterable[str]) -> int:
    """Return the layers for multi-token prediction, if tensors of these names have none of them."""
    prefixes = tuple(f"model.layers.{layer}." for layer in model.mtp_layers)
    is_there = any(name.startswith(prefixes) for name in names) if prefixes else True
    return 0 if is_there else model.num_mtp_layers


def import_hf(
    folder: str | Path,
    *,
    seq_length: int | None = None,
    groups: ProcessGroups | None = None,
    device: torch.device | str = "cpu",
) -> ImportedModel:
    """Build a model in float32 from a folder and load its weights.

    Args:
        folder: Folder with ``config.json`` and the weights: the files listed in
            ``model.safetensors.index.json``, else ``model.safetensors``, else all
            ``*.safetensors``.
        seq_length: Tokens per sequence. Default: the maximum of the model.
        groups: Process groups of this rank, which gets its shard of every layer; there is no
            pipeline. Default: one process.
        device: Device of the parameters.

    Raises:
        MegacoreError: If a file is missing, unreadable or contradicts another one, or the model
            uses an unsupported feature.
    """
    groups = ProcessGroups.single() if groups is None else groups
    found = open_folder(folder, seq_length=seq_length)
    model, moe = found.model, found.moe
    weights = HFWeights(found.files, found.config, model, moe)
    chunk = GPTChunk(
        model,
        layers=range(model.num_layers),
        has_embedding=True,
        has_head=True,
        groups=groups,
        device=device,
        moe=moe,
        initialize=False,
    )
    fill_chunk(chunk, weights, groups)
    return ImportedModel(chunk=chunk, model=model, moe=moe)


@torch.no_grad()
def fill_chunk(chunk: GPTChunk, weights: HFWeights, groups: ProcessGroups) -> None:
    """Read this rank's shards of all parameters into its chunk, one parameter at a time.

    Args:
        chunk: Any part of the model in any layout.
        weights: The parameters; additional ones are ignored.
        groups: The groups of the chunk.
    """
    for info, values in (*chunk.param_infos(), *chunk.buffer_infos()):
        weights.read_into(values, info.name, ShardPosition.of(info, groups))


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
