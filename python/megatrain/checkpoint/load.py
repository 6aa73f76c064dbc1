"""Checkpoint load into any layout."""

from __future__ import annotations

import io
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megacore.errors import CheckpointError
from megacore.optim import ParamPiece
from megacore.optim.weight_average import AVERAGE
from megacore.parallel.process_groups import ProcessGroups
from megatrain.checkpoint.agreement import gather_results, on_every_rank, on_rank_0
from megatrain.checkpoint.archives import archive_of, bytes_of
from megatrain.checkpoint.checked_files import ADVICE, CheckedReader
from megatrain.checkpoint.chunks import MAIN_PARAM, Chunk, chunks_of, tensor_key
from megatrain.checkpoint.find import resolve_checkpoint, verify_files
from megatrain.checkpoint.format import (
    METADATA_NAME,
    TENSORS_NAME,
    CheckpointIndex,
    TrainState,
    check_files,
    read_index,
)
from megatrain.checkpoint.metadata import index_of_metadata, read_metadata
from megatrain.checkpoint.tensor_checks import check_index
from megatrain.checkpoint.tensor_file import read_tensor_index
from megatrain.checkpoint.tensor_index import Box, Numbers, StoredTensor, TensorIndex


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
    tensors = on_every_rank(lambda: open_tensors(folder, index, mapped=True), groups)
    # The other ranks have the same file, by its checksum.
    on_rank_0(lambda: check_tensors(folder, tensors, index), groups)
    fit = _Fit(folder, index, tensors, config or {})
    used = gather_results(lambda: fit.check(pieces), groups)
    on_rank_0(lambda: fit.check_left_over(used), groups)
    # No limit on box sizes here: memory is bounded by the stored chunks.
    chunks = chunks_of(pieces, groups, max_numel=1 << 62)
    on_every_rank(lambda: _fill_from_folder(folder, tensors, chunks), groups)
    return index.state


def open_tensors(folder: Path, index: CheckpointIndex, *, mapped: bool = False) -> TensorIndex:
    """Open the index of a checkpoint's tensors; that of an older one is built from ``.metadata``.

    Args:
        folder: The checkpoint folder.
        index: Its ``index.json``.
        mapped: Share its memory with other processes of the host; the folder must stay meanwhile.

    Raises:
        CheckpointError: If it is missing, damaged or malformed; see `check_tensors`.
    """
    if TENSORS_NAME in index.files:
        path = folder / TENSORS_NAME
        return read_tensor_index(path, index.files[TENSORS_NAME], mapped=mapped)
    return index_of_metadata(read_metadata(folder, index))


def check_tensors(folder: Path, tensors: TensorIndex, index: CheckpointIndex) -> None:
    """Check that the index of the tensors describes what the files contain.

    Raises:
        CheckpointError: If it does not.
    """
    name = TENSORS_NAME if TENSORS_NAME in index.files else METADATA_NAME
    try:
        check_index(tensors, index.files)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / name} is refused: {error}") from error


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
        tensors = open_tensors(self.folder, index)
        check_tensors(self.folder, tensors, index)
        self._stored = _stored_tensors(tensors, MAIN_PARAM)
        averages = _stored_tensors(tensors, AVERAGE) if averaged else {}
        if averaged and not averages:
            raise CheckpointError(
                f"checkpoint {self.folder} has no moving average of the weights, which runs keep "
                "with optimizer.ema_decay above 0; leave --ema out"
            )
        self._stored |= averages
        self._reader = CheckedReader(self.folder, {} if verified else index.files)
        self._rows: dict[str, tuple[list[int], list[Box]] | None] = {}

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
        return self._find(name).dtype

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
        size = self._find(name).shape
        return self._read(name, (0,) * len(size), size)

    def read_part(self, name: str, first: int, last: int) -> Tensor:
        """Read the elements ``[first, last)`` of the first dimension of a parameter.

        Raises:
            CheckpointError: As `read_param`.
        """
        size = self._find(name).shape
        return self._read(name, (first, *(0 for _ in size[1:])), (last - first, *size[1:]))

    def _read(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        values = torch.empty(sizes, dtype=self.dtype(name))
        _fill(self._reader, self._find(name), offsets, values)
        return values

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
            count = min(into.numel() - done, box.numel - skipped)
            part = into[done : done + count]
            _read_box(self._reader, self._find(name).key, box, part, skipped=skipped)
            done += count

    def verify(self) -> None:
        """Verify the checksums of all files unless that was done first; reads what was not read.

        Raises:
            CheckpointError: With the name of a missing or damaged file.
        """
        self._reader.verify()

    def _boxes_in_order(self, name: str) -> tuple[list[int], list[Box]] | None:
        if name not in self._rows:
            self._rows[name] = _ranges(self._find(name))
        return self._rows[name]

    def _find(self, name: str) -> StoredTensor:
        if name not in self._stored:
            raise CheckpointError(
                f"checkpoint {self.folder} has no parameter {name}, which its own "
                "configuration asks for; it was written by another version of the model"
            )
        return self._stored[name]


def _ranges(stored: StoredTensor) -> tuple[list[int], list[Box]] | None:
    """Return the boxes of a tensor with their first elements if all are ranges of elements."""
    size = stored.shape
    strides = [math.prod(size[dim + 1 :]) for dim in range(len(size))]
    placed = []
    for box in stored.boxes():
        split = next((dim for dim, count in enumerate(box.sizes) if count != 1), len(size))
        if box.sizes[split + 1 :] != size[split + 1 :]:
            return None
        first = sum(at * stride for at, stride in zip(box.offsets, strides, strict=True))
        placed.append((first, box))
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
        tensors: TensorIndex,
        config: Mapping[str, Any],
    ) -> None:
        self._folder = folder
        self._tensors = tensors
        self._differences = _differences(index.config, config)

    def check(self, pieces: Sequence[ParamPiece]) -> Numbers:
        """Check that every piece can be filled, and return the numbers of the parameters."""
        used = set()
        for piece in pieces:
            info = piece.info
            number = self._tensors.number_of(tensor_key(MAIN_PARAM, info.name))
            if number is None:
                raise CheckpointError(
                    f"checkpoint {self._folder} has no parameter {info.name}{self._differences}"
                )
            used.add(number)
            shape = StoredTensor(self._tensors, number).shape
            if shape != info.full_shape:
                raise CheckpointError(
                    f"parameter {info.name} has shape {list(shape)} in checkpoint "
                    f"{self._folder}, but {list(info.full_shape)} in this model{self._differences}"
                )
            for kind in piece.tensors:
                if self._tensors.number_of(tensor_key(kind, info.name)) is None:
                    raise CheckpointError(
                        f"checkpoint {self._folder} has no {kind} of parameter {info.name}, which "
                        "is needed to continue training; to start anew from its weights, set "
                        "checkpoint.load_weights instead of checkpoint.resume"
                    )
        return np.array(sorted(used), np.int64)

    def check_left_over(self, used: Sequence[Numbers]) -> None:
        """Check that every parameter of the checkpoint is used by some rank."""
        first, end = self._tensors.range_of(tensor_key(MAIN_PARAM, ""))
        left_over = np.setdiff1d(np.arange(first, end), np.concatenate(used))
        if len(left_over):
            prefix = tensor_key(MAIN_PARAM, "")
            raise CheckpointError(
                f"checkpoint {self._folder} has parameters this model does not use, such as "
                f"{self._tensors.key(int(left_over[0])).removeprefix(prefix)} "
                f"({len(left_over)} in all){self._differences}"
            )


def _stored_tensors(tensors: TensorIndex, kind: str) -> dict[str, StoredTensor]:
    """Select the logical tensors of one kind, by parameter name."""
    prefix = tensor_key(kind, "")
    numbers = range(*tensors.range_of(prefix))
    stored = [StoredTensor(tensors, number) for number in numbers]
    return {tensor.key.removeprefix(prefix): tensor for tensor in stored}


def _fill_from_folder(folder: Path, tensors: TensorIndex, chunks: Sequence[Chunk]) -> None:
    with CheckedReader(folder, {}) as reader:  # verified before
        for chunk in chunks:
            stored = tensors.find(chunk.key)
            assert stored is not None  # checked by `_Fit`
            if stored.shape != chunk.full_shape:
                raise CheckpointError(
                    f"{chunk.key} has shape {list(stored.shape)} in checkpoint {folder}, but "
                    f"{list(chunk.full_shape)} in this model"
                )
            _fill(reader, stored, chunk.offsets, chunk.tensor.detach())


@torch.no_grad()
def _fill(
    reader: CheckedReader, stored: StoredTensor, offsets: Sequence[int], values: Tensor
) -> None:
    """Fill a box of a tensor from the stored boxes that it overlaps, without communication."""
    for box in stored.overlapping(offsets, values.shape):
        first = [max(pair) for pair in zip(offsets, box.offsets, strict=True)]
        ends = (
            [at + count for at, count in zip(where, sizes, strict=True)]
            for where, sizes in ((offsets, values.shape), (box.offsets, box.sizes))
        )
        last = [min(pair) for pair in zip(*ends, strict=True)]
        target = _between(values, offsets, first, last)
        is_whole = tuple(target.shape) == box.sizes
        direct = is_whole and target.is_contiguous() and target.device.type == "cpu"
        if direct and target.dtype == stored.dtype:
            _read_box(reader, stored.key, box, target.view(-1))
            continue
        whole = torch.empty(box.sizes, dtype=stored.dtype)
        _read_box(reader, stored.key, box, whole.view(-1))
        target.copy_(_between(whole, box.offsets, first, last))


def _between(
    values: Tensor, offsets: Sequence[int], first: Sequence[int], last: Sequence[int]
) -> Tensor:
    """Return the elements of a box of a tensor from index ``first`` to before ``last``."""
    return values[
        tuple(slice(a - at, b - at) for at, a, b in zip(offsets, first, last, strict=True))
    ]


def _read_box(reader: CheckedReader, key: str, box: Box, into: Tensor, *, skipped: int = 0) -> None:
    """Read elements of a stored box, from element ``skipped`` on, in the stored dtype.

    Raises:
        CheckpointError: If they cannot be read.
    """
    name, offset, head = box.file, box.place, box.head
    if not head:  # the archive may be of another version of torch
        archive = archive_of(into.dtype, box.sizes)
        is_ours = box.length == archive.num_bytes
        if is_ours and reader.read(name, offset, len(archive.head)) == archive.head:
            head = len(archive.head)
    if head:
        reader.read_into(name, offset + head + skipped * into.dtype.itemsize, bytes_of(into))
        return
    content = io.BytesIO(reader.read(name, offset, box.length))
    try:
        values = torch.load(content, map_location="cpu", weights_only=True)
        whole = values.expand(box.sizes).reshape(-1)
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
