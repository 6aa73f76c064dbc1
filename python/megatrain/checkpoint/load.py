"""Checkpoint load into any layout."""

from __future__ import annotations

import io
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megacore.errors import CheckpointError
from megacore.optim import ParamPiece
from megacore.optim.weight_average import AVERAGE
from megacore.parallel.process_groups import ProcessGroups
from megatrain.checkpoint.agreement import gather_results, on_every_rank
from megatrain.checkpoint.archives import archive_of, bytes_of
from megatrain.checkpoint.checked_files import ADVICE, CheckedReader
from megatrain.checkpoint.chunks import MAIN_PARAM, Chunk, chunks_of, tensor_key
from megatrain.checkpoint.find import resolve_checkpoint, verify_files
from megatrain.checkpoint.format import CheckpointIndex, TrainState, check_files, read_index
from megatrain.checkpoint.metadata import read_metadata
from megatrain.checkpoint.planner import box_of


def load_checkpoint(
    path: str | Path,
    pieces: Sequence[ParamPiece],
    *,
    groups: ProcessGroups,
    config: Mapping[str, Any] | None = None,
    verified: bool = False,
) -> TrainState:
    """Fill the tensors of ``pieces`` from a checkpoint of any layout. Collective.

    The state is restored bit for bit on any layout, because values are only redistributed, not
    recomputed.

    Args:
        path: A checkpoint folder, the folder of all checkpoints, or a run's folder.
        pieces: Pieces of this rank; their tensors are overwritten.
        groups: Process groups of this rank.
        config: The current configuration as plain values; used to explain a mismatch.
        verified: Whether `find_checkpoint` has already verified the checksums.

    Returns:
        Progress of the run.

    Raises:
        CheckpointError: On every rank, if the checkpoint is missing, damaged, of another format, or
            of another model. The pieces may then be partly filled.

    Sync:
        Waits for all ranks.
    """
    folder = on_every_rank(lambda: resolve_checkpoint(path), groups)
    if verified:
        index = on_every_rank(lambda: read_index(folder), groups)
    else:
        index = verify_files(folder, groups)
    metadata = on_every_rank(lambda: read_metadata(folder, index), groups)
    fit = _Fit(folder, index, metadata, config or {})
    names = gather_results(lambda: fit.check(pieces), groups)
    fit.check_left_over(set().union(*names))
    # No limit on box sizes here: memory is bounded by the stored chunks.
    chunks = chunks_of(pieces, groups, max_numel=1 << 62)
    on_every_rank(lambda: _fill_from_folder(folder, metadata, chunks), groups)
    return index.state


class StoredWeights:
    """Weights of a checkpoint, read on demand, in one process.

    Args:
        path: A checkpoint folder, the folder of all checkpoints, or a run's folder.
        verified: Whether to verify all files first. Otherwise call `verify` after the last value
            was read and before any is used: it reads only what was not read until then.
        averaged: Read the moving average of the weights, where a parameter has one.

    Attributes:
        folder: The checkpoint folder.
        config: The run's configuration as plain values.
        state: Progress of the run.

    Raises:
        CheckpointError: If the checkpoint is missing, damaged or of another format, or has no
            moving average.
    """

    def __init__(self, path: str | Path, *, verified: bool = True, averaged: bool = False) -> None:
        self.folder = resolve_checkpoint(path)
        if verified:
            index = verify_files(self.folder, ProcessGroups.single())
        else:
            index = read_index(self.folder)
            check_files(self.folder, index)
        self.config = index.config
        self.state = index.state
        self._metadata = read_metadata(self.folder, index)
        self._stored = _stored_tensors(self._metadata, MAIN_PARAM)
        averages = _stored_tensors(self._metadata, AVERAGE) if averaged else {}
        if averaged and not averages:
            raise CheckpointError(
                f"checkpoint {self.folder} has no moving average of the weights, which runs keep "
                "with optimizer.ema_decay above 0; leave --ema out"
            )
        self._stored |= averages
        self._averaged = averages.keys()
        self._reader = CheckedReader(self.folder, {} if verified else index.files)
        self._rows: dict[str, tuple[list[int], list[ChunkStorageMetadata]] | None] = {}

    def __enter__(self) -> StoredWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def names(self) -> list[str]:
        """Return the names of all parameters and checkpointed buffers."""
        return sorted(self._stored)

    def dtype(self, name: str) -> torch.dtype:
        """Return the number format of a parameter: float32, or that of imported weights.

        Raises:
            CheckpointError: If the checkpoint lacks it.
        """
        dtype = self._find(name).properties.dtype
        assert isinstance(dtype, torch.dtype)  # checked by `read_metadata`
        return dtype

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read whole parameters by name, in the stored dtype.

        Raises:
            CheckpointError: As `read_param`.
        """
        return {name: self.read_param(name) for name in names}

    def read_param(self, name: str) -> Tensor:
        """Read a whole parameter, in the stored dtype.

        Raises:
            CheckpointError: If the checkpoint lacks the parameter or cannot be read.
        """
        size = tuple(self._find(name).size)
        return self._read(name, (0,) * len(size), size)

    def read_part(self, name: str, first: int, last: int) -> Tensor:
        """Read the elements ``[first, last)`` of the first dimension of a parameter.

        Raises:
            CheckpointError: As `read_param`.
        """
        size = tuple(self._find(name).size)
        return self._read(name, (first, *(0 for _ in size[1:])), (last - first, *size[1:]))

    def _read(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        chunk = Chunk(
            key=self._key(name),
            full_shape=tuple(self._find(name).size),
            offsets=offsets,
            tensor=torch.empty(sizes, dtype=self.dtype(name)),
        )
        _fill(self._reader, self._metadata, [chunk])
        return chunk.tensor

    def has_ranges(self, name: str) -> bool:
        """Check whether each stored box is a range of the flattened parameter.

        Raises:
            CheckpointError: If the checkpoint lacks it.
        """
        return self._boxes_in_order(name) is not None

    def read_range(self, name: str, start: int, into: Tensor) -> None:
        """Read a range of a flattened parameter that has ranges.

        Args:
            name: The parameter.
            start: First element.
            into: Contiguous tensor of the parameter's dtype.

        Raises:
            CheckpointError: As `read_param`.
        """
        boxes = self._boxes_in_order(name)
        assert boxes is not None
        starts, chunks = boxes
        done = 0
        while done < into.numel():
            number = bisect_right(starts, start + done) - 1
            box, skipped = chunks[number], start + done - starts[number]
            count = min(into.numel() - done, math.prod(box.sizes) - skipped)
            key = self._key(name)
            _read_box(
                self._reader, self._metadata, key, box, into[done : done + count], skipped=skipped
            )
            done += count

    def verify(self) -> None:
        """Verify the checksums of all files unless that was done first; reads what was not read.

        Raises:
            CheckpointError: With the name of a missing or damaged file.
        """
        self._reader.verify()

    def _boxes_in_order(self, name: str) -> tuple[list[int], list[ChunkStorageMetadata]] | None:
        if name not in self._rows:
            stored = self._find(name)
            self._rows[name] = _ranges(stored)
        return self._rows[name]

    def _key(self, name: str) -> str:
        return tensor_key(AVERAGE if name in self._averaged else MAIN_PARAM, name)

    def _find(self, name: str) -> TensorStorageMetadata:
        if name not in self._stored:
            raise CheckpointError(
                f"checkpoint {self.folder} has no parameter {name}, which its own "
                "configuration asks for; it was written by another version of the model"
            )
        return self._stored[name]


def _ranges(stored: TensorStorageMetadata) -> tuple[list[int], list[ChunkStorageMetadata]] | None:
    """Return the boxes of a tensor with their first elements if all are ranges of elements."""
    size = tuple(stored.size)
    strides = [math.prod(size[dim + 1 :]) for dim in range(len(size))]
    placed = []
    for box in stored.chunks:
        split = next((dim for dim, count in enumerate(box.sizes) if count != 1), len(size))
        if any(
            count != whole
            for count, whole in zip(box.sizes[split + 1 :], size[split + 1 :], strict=True)
        ):
            return None
        placed.append(
            (sum(at * stride for at, stride in zip(box.offsets, strides, strict=True)), box)
        )
    placed.sort(key=lambda item: item[0])
    return [start for start, _ in placed], [box for _, box in placed]


def load_full_weights(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read all weights of a checkpoint as whole tensors, in one process; see `StoredWeights`.

    Returns:
        The run's configuration as plain values; each parameter by name, full shape, float32 or the
        dtype of imported weights.

    Raises:
        CheckpointError: If the checkpoint is missing, damaged or of another format.
    """
    with StoredWeights(path, verified=False) as stored:
        weights = stored.read(stored.names())
        stored.verify()
    return stored.config, weights


class _Fit:
    """Check that a model can be loaded from a checkpoint."""

    def __init__(
        self,
        folder: Path,
        index: CheckpointIndex,
        metadata: Metadata,
        config: Mapping[str, Any],
    ) -> None:
        self._folder = folder
        self._metadata = metadata
        self._params = _stored_tensors(metadata, MAIN_PARAM)
        self._differences = _differences(index.config, config)

    def check(self, pieces: Sequence[ParamPiece]) -> set[str]:
        """Check that every piece can be filled, and return the names of the parameters."""
        for piece in pieces:
            info = piece.info
            stored = self._params.get(info.name)
            if stored is None:
                raise CheckpointError(
                    f"checkpoint {self._folder} has no parameter {info.name}{self._differences}"
                )
            if tuple(stored.size) != info.full_shape:
                raise CheckpointError(
                    f"parameter {info.name} has shape {list(stored.size)} in checkpoint "
                    f"{self._folder}, but {list(info.full_shape)} in this model{self._differences}"
                )
            for kind in piece.tensors:
                if tensor_key(kind, info.name) not in self._metadata.state_dict_metadata:
                    raise CheckpointError(
                        f"checkpoint {self._folder} has no {kind} of parameter {info.name}, which "
                        "is needed to continue training; to start anew from its weights, set "
                        "checkpoint.load_weights instead of checkpoint.resume"
                    )
        return {piece.info.name for piece in pieces}

    def check_left_over(self, used: set[str]) -> None:
        """Check that every parameter of the checkpoint is used."""
        left_over = sorted(set(self._params) - used)
        if left_over:
            raise CheckpointError(
                f"checkpoint {self._folder} has parameters this model does not use, such as "
                f"{left_over[0]} ({len(left_over)} in all){self._differences}"
            )


def _stored_tensors(metadata: Metadata, kind: str) -> dict[str, TensorStorageMetadata]:
    """Select the logical tensors of one kind, by parameter name."""
    prefix = tensor_key(kind, "")
    return {
        key.removeprefix(prefix): stored
        for key, stored in metadata.state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(stored, TensorStorageMetadata)
    }


def _fill_from_folder(folder: Path, metadata: Metadata, chunks: Sequence[Chunk]) -> None:
    with CheckedReader(folder, {}) as reader:  # verified before
        _fill(reader, metadata, chunks)


@torch.no_grad()
def _fill(reader: CheckedReader, metadata: Metadata, chunks: Sequence[Chunk]) -> None:
    """Fill the chunks from the stored boxes that they overlap, without communication.

    Every key is in the checkpoint, with the same shape.
    """
    for chunk in chunks:
        stored = metadata.state_dict_metadata[chunk.key]
        assert isinstance(stored, TensorStorageMetadata)  # checked by `read_metadata`
        boxes = {box.offsets: box for box in stored.chunks}
        for item in create_read_items_for_chunk_list(chunk.key, stored, [box_of(chunk)]):
            box = boxes[torch.Size(item.storage_index.offset or ())]
            target = _narrowed(chunk.tensor.detach(), item.dest_offsets, item.lengths)
            is_whole = tuple(item.lengths) == tuple(box.sizes)
            direct = is_whole and target.is_contiguous() and target.device.type == "cpu"
            if direct and target.dtype == stored.properties.dtype:
                _read_box(reader, metadata, chunk.key, box, target.view(-1))
                continue
            values = torch.empty(box.sizes, dtype=stored.properties.dtype)
            _read_box(reader, metadata, chunk.key, box, values.view(-1))
            target.copy_(_narrowed(values, item.storage_offsets, item.lengths))


def _narrowed(values: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return a view of a box of a tensor."""
    return values[tuple(slice(at, at + n) for at, n in zip(offsets, lengths, strict=True))]


def _read_box(
    reader: CheckedReader,
    metadata: Metadata,
    key: str,
    box: ChunkStorageMetadata,
    into: Tensor,
    *,
    skipped: int = 0,
) -> None:
    """Read elements of a stored box, from element ``skipped`` on, in the stored dtype.

    Raises:
        CheckpointError: If they cannot be read.
    """
    stored = metadata.storage_data[MetadataIndex(key, box.offsets)]
    name, offset = stored.relative_path, stored.offset
    archive = archive_of(into.dtype, tuple(box.sizes))
    is_ours = stored.length == archive.num_bytes
    if is_ours and reader.read(name, offset, len(archive.head)) == archive.head:
        first = offset + len(archive.head) + skipped * into.dtype.itemsize
        reader.read_into(name, first, bytes_of(into))
        return
    # Written by another version of torch.
    content = io.BytesIO(reader.read(name, offset, stored.length))
    try:
        values = torch.load(content, map_location="cpu", weights_only=True)
        whole = values.expand(tuple(box.sizes)).reshape(-1)
        into.copy_(whole[skipped : skipped + into.numel()])
    except Exception as error:  # an invalid archive fails in many ways
        raise CheckpointError(
            f"cannot read {key} in checkpoint file {name}: {type(error).__name__}: {error}; "
            f"{ADVICE}"
        ) from error


def _differences(stored: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """Format the model settings that differ, as the end of a sentence."""
    found = []
    for section in ("model", "moe", "lora"):
        theirs, ours = stored.get(section, {}), present.get(section, {})
        found += [
            f"{section}.{key} is {theirs[key]} there and {ours[key]} here"
            for key in sorted(set(theirs) & set(ours))
            if theirs[key] != ours[key]
        ]
    if found:
        return "; " + ", ".join(found)
    return "; it belongs to another model: compare the [model] settings with those of that run"
