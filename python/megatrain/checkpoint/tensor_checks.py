"""Checks of what an index of tensors says, in batches of bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from megacore.errors import CheckpointError
from megatrain.checkpoint.checked_files import FileSum
from megatrain.checkpoint.tensor_index import Numbers, StoredTensor, TensorIndex, dtype_of

# Boxes of a batch; a tensor with more is a batch of its own.
_BATCH = 1 << 16


def check_index(index: TensorIndex, files: Mapping[str, FileSum]) -> None:
    """Check that boxes tile the tensors and lie in the files, with distinct names.

    Raises:
        CheckpointError: With the first tensor or file for which it does not hold.
    """
    for name in index.files:
        if Path(name).name != name or name not in files:
            raise CheckpointError(f"it refers to the file {name!r}, which index.json does not list")
    try:
        keys = [index.key(number) for number in range(index.num_tensors)]
    except UnicodeDecodeError as error:
        raise CheckpointError(f"a name is not text: {error}") from error
    if any(before >= after for before, after in pairwise(keys)):
        raise CheckpointError("its names are not sorted")
    known = np.array([files[name].num_bytes for name in index.files], np.int64)
    used = 0
    for batch in _batches(index):
        _check_places(index, batch, known)
        _check_tiling(index, batch)
        _check_lengths(index, batch)
        used += int(batch.of_boxes(index, "lengths").sum())
    if used > int(known.sum()):
        raise CheckpointError("its tensors share bytes of the files")


def check_tiling(index: TensorIndex) -> None:
    """Check that each element of each tensor is in exactly one box.

    Raises:
        CheckpointError: With the first tensor for which it does not hold.
    """
    for batch in _batches(index):
        _check_tiling(index, batch)


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Consecutive tensors ``[first, end)`` and the number of boxes of each."""

    first: int
    end: int
    counts: Numbers

    def of_tensors(self, index: TensorIndex, column: str) -> Numbers:
        return index.columns[column][self.first : self.end].astype(np.int64)

    def of_boxes(self, index: TensorIndex, column: str) -> Numbers:
        start = index.first_box(self.first)
        return index.columns[column][start : start + int(self.counts.sum())].astype(np.int64)

    def tensors(self) -> Numbers:
        """Return the tensor of each box, from 0 in this batch."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def first_where(self, index: TensorIndex, wrong: Numbers) -> tuple[StoredTensor, int] | None:
        """Return the first box for which a condition holds, with its tensor."""
        found = np.flatnonzero(wrong)
        if not len(found):
            return None
        box = int(found[0])
        tensor = StoredTensor(index, self.first + int(self.tensors()[box]))
        return tensor, index.first_box(self.first) + box


def _batches(index: TensorIndex) -> Iterator[_Batch]:
    ends, counts, first = index.columns["box_ends"], index.num_boxes_of_tensors(), 0
    while first < index.num_tensors:
        limit = index.first_box(first) + _BATCH
        end = max(first + 1, int(np.searchsorted(ends, limit, side="right")))
        yield _Batch(first=first, end=end, counts=counts[first:end])
        first = end


def _check_places(index: TensorIndex, batch: _Batch, known: Numbers) -> None:
    """Check that archives lie in their files, without sums that may overflow."""
    files = batch.of_boxes(index, "files")
    if len(files) and not 0 <= int(files.min()) <= int(files.max()) < len(known):
        raise CheckpointError(f"it refers to file {int(files.max())} of {len(known)}")
    places, lengths = batch.of_boxes(index, "places"), batch.of_boxes(index, "lengths")
    beyond = (places < 0) | (lengths < 0) | (lengths > known[files] - places)
    if found := batch.first_where(index, beyond):
        name = index.files[int(index.columns["files"][found[1]])]
        raise CheckpointError(f"it refers to bytes beyond the end of {name}")


def _check_lengths(index: TensorIndex, batch: _Batch) -> None:
    """Check that archives are long enough for their values; boxes lie in their tensors."""
    itemsize = np.array([dtype_of(name).itemsize for name in index.dtypes], np.int64)
    needed = batch.of_boxes(index, "sizes").prod(axis=1)
    needed *= itemsize[batch.of_tensors(index, "dtypes")][batch.tensors()]
    heads, lengths = batch.of_boxes(index, "heads"), batch.of_boxes(index, "lengths")
    if found := batch.first_where(index, (heads < 0) | (needed > lengths - heads)):
        tensor, box = found
        first = index.columns["offsets"][box, : len(tensor.shape)].tolist()
        raise CheckpointError(f"the files lack the values of {tensor.key} from {first} on")


def _check_tiling(index: TensorIndex, batch: _Batch) -> None:
    """Check that each element of each tensor of a batch is in exactly one box.

    Boxes tile a tensor exactly if the mixed differences of their indicator functions add up to
    that of the tensor: a signed sum over corners, which sorts them instead of comparing pairs.
    """
    shapes, tensors = batch.of_tensors(index, "shapes"), batch.tensors()
    first, sizes = batch.of_boxes(index, "offsets"), batch.of_boxes(index, "sizes")
    whole = shapes[tensors]
    outside = (sizes < 1) | (first < 0) | (whole < 0) | (sizes > whole) | (first > whole - sizes)
    if found := batch.first_where(index, np.any(outside, axis=1, keepdims=True)[:, 0]):
        raise _not_tiled(found[0])
    corners = [math.prod(extent + 1 for extent in shape) for shape in shapes.tolist()]
    if min(map(min, shapes.tolist()), default=0) < 0 or sum(corners) >= 1 << 62:
        raise CheckpointError("its tensors are too large")
    base = np.cumsum([0, *corners])
    strides = np.ones_like(shapes)
    for dim in range(shapes.shape[1] - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * (shapes[:, dim + 1] + 1)
    of_boxes = _corners(base[tensors], strides[tensors], first, sizes)
    of_tensors = _corners(base[:-1], strides, np.zeros_like(shapes), shapes)
    places = np.concatenate([of_boxes[0], of_tensors[0]])
    signs = np.concatenate([of_boxes[1], -of_tensors[1]])
    order = np.argsort(places, kind="stable")
    places = places[order]
    starts = np.flatnonzero(np.diff(places, prepend=-1))
    wrong = np.flatnonzero(np.add.reduceat(signs[order], starts)) if len(starts) else starts
    if len(wrong):
        number = int(np.searchsorted(base, places[starts[wrong[0]]], side="right")) - 1
        raise _not_tiled(StoredTensor(index, batch.first + number))


def _not_tiled(tensor: StoredTensor) -> CheckpointError:
    return CheckpointError(f"the boxes of {tensor.key} do not cover its shape {list(tensor.shape)}")


def _corners(
    base: Numbers, strides: Numbers, first: Numbers, sizes: Numbers
) -> tuple[Numbers, Numbers]:
    """Return numbers of the corners of boxes, and their signs: negative for odd upper bounds."""
    places, signs = base, np.ones(len(base), np.int64)
    for dim in range(strides.shape[1]):
        low = places + np.tile(first[:, dim] * strides[:, dim], 1 << dim)
        high = low + np.tile(sizes[:, dim] * strides[:, dim], 1 << dim)
        places, signs = np.concatenate([low, high]), np.concatenate([signs, -signs])
    return places, signs
