"""The tensors of a checkpoint, their boxes and where these lie, in flat numpy columns.

A checkpoint of 16,384 ranks has more than a million boxes. As objects they take minutes and
gigabytes; as columns a rank maps a file of some 40 bytes per box and looks up its own tensors.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megacore.errors import CheckpointError

Numbers = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Box:
    """One stored box of a tensor.

    Attributes:
        offsets: First index in each dimension.
        sizes: Extent in each dimension.
        file: Name of the file.
        place: First byte of its archive in the file.
        length: Bytes of the archive.
        head: Bytes of the archive before the values; 0 if it is not known.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    place: int
    length: int
    head: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


class StoredTensor:
    """One tensor of a checkpoint.

    Attributes:
        key: Name of the tensor.
        dtype: Number format of its values.
        shape: Full shape.
    """

    def __init__(self, index: TensorIndex, number: int) -> None:
        columns = index.columns
        self._index = index
        self._first, self._end = index.first_box(number), index.first_box(number + 1)
        dims = int(columns["num_dims"][number])
        self.key = index.key(number)
        self.dtype = dtype_of(index.dtypes[int(columns["dtypes"][number])])
        self.shape = tuple(columns["shapes"][number, :dims].tolist())

    @property
    def num_boxes(self) -> int:
        """Number of boxes."""
        return self._end - self._first

    def boxes(self) -> Iterator[Box]:
        """Yield all boxes, sorted by their offsets."""
        return (self._box(number) for number in range(self._first, self._end))

    def overlapping(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Box]:
        """Yield the boxes that have elements in common with a box."""
        columns, rows, dims = self._index.columns, slice(self._first, self._end), len(self.shape)
        first = columns["offsets"][rows, :dims].astype(np.int64)
        last = first + columns["sizes"][rows, :dims].astype(np.int64)
        low = np.array(offsets, np.int64)
        meets = (first < low + np.array(sizes, np.int64)) & (low < last)
        for number in np.flatnonzero(meets.all(axis=1)).tolist():
            yield self._box(self._first + number)

    def _box(self, number: int) -> Box:
        columns, dims = self._index.columns, len(self.shape)
        return Box(
            offsets=tuple(columns["offsets"][number, :dims].tolist()),
            sizes=tuple(columns["sizes"][number, :dims].tolist()),
            file=self._index.files[int(columns["files"][number])],
            place=int(columns["places"][number]),
            length=int(columns["lengths"][number]),
            head=int(columns["heads"][number]),
        )


class TensorIndex:
    """All tensors of a checkpoint, sorted by name; their boxes, sorted by tensor and offsets.

    Args:
        dtypes: Names of the number formats that column ``dtypes`` counts.
        files: Names of the files that column ``files`` counts.
        columns: ``names`` (UTF-8 bytes of all names, one after the other), ``name_ends``,
            ``dtypes``, ``num_dims``, ``shapes`` (D numbers, the rest 1) and ``box_ends`` of each
            tensor; ``offsets`` (D numbers, the rest 0), ``sizes`` (D numbers, the rest 1),
            ``files``, ``places``, ``lengths`` and ``heads`` of each box, as in `Box`.
    """

    def __init__(
        self, *, dtypes: Sequence[str], files: Sequence[str], columns: Mapping[str, Numbers]
    ) -> None:
        self.dtypes = tuple(dtypes)
        self.files = tuple(files)
        self.columns = dict(columns)

    @property
    def num_tensors(self) -> int:
        """Number of tensors."""
        return len(self.columns["num_dims"])

    @property
    def num_boxes(self) -> int:
        """Number of boxes of all tensors."""
        return len(self.columns["files"])

    def key(self, number: int) -> str:
        """Return the name of a tensor."""
        return self.raw_key(number).decode()

    def keys(self, prefix: str = "") -> list[str]:
        """List the names that begin with a prefix."""
        first, end = self.range_of(prefix)
        return [self.key(number) for number in range(first, end)]

    def range_of(self, prefix: str) -> tuple[int, int]:
        """Return the first number of the tensors whose names begin with a prefix, and the end."""
        raw, numbers = prefix.encode(), range(self.num_tensors)
        first = bisect_left(numbers, raw, key=self.raw_key)
        end = bisect_left(
            numbers, True, lo=first, key=lambda number: not self.raw_key(number).startswith(raw)
        )
        return first, end

    def number_of(self, key: str) -> int | None:
        """Return the number of a tensor; ``None`` if there is no such tensor."""
        raw = key.encode()
        number = bisect_left(range(self.num_tensors), raw, key=self.raw_key)
        found = number < self.num_tensors and self.raw_key(number) == raw
        return number if found else None

    def find(self, key: str) -> StoredTensor | None:
        """Return a tensor by name; ``None`` if there is no such tensor."""
        number = self.number_of(key)
        return None if number is None else StoredTensor(self, number)

    def num_bytes(self) -> int:
        """Bytes of the values of all tensors."""
        itemsize = [dtype_of(name).itemsize for name in self.dtypes]
        return sum(
            math.prod(shape) * itemsize[code]
            for shape, code in zip(
                self.columns["shapes"].tolist(), self.columns["dtypes"].tolist(), strict=True
            )
        )

    def first_box(self, number: int) -> int:
        """Return the number of the first box of a tensor; that of the end for the end."""
        return int(self.columns["box_ends"][number - 1]) if number else 0

    def num_boxes_of_tensors(self) -> Numbers:
        """Return the number of boxes of each tensor, int64."""
        ends: Numbers = self.columns["box_ends"].astype(np.int64)
        counts: Numbers = ends - np.concatenate([[0], ends[:-1]])
        return counts

    def raw_key(self, number: int) -> bytes:
        """Return the name of a tensor in UTF-8."""
        ends = self.columns["name_ends"]
        first = int(ends[number - 1]) if number else 0
        return self.columns["names"][first : int(ends[number])].tobytes()


def dtype_of(name: str) -> torch.dtype:
    """Return a dtype of torch by name.

    Raises:
        CheckpointError: If there is none.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the dtype of a tensor must be a torch dtype, got {name!r}")
    return dtype


def tensor_columns(
    keys: Sequence[str], dtypes: Sequence[int], shapes: Sequence[tuple[int, ...]]
) -> dict[str, Numbers]:
    """Build the columns of tensors, without the numbers of their boxes.

    Args:
        keys: Sorted names.
        dtypes: Number of each tensor's format.
        shapes: Full shapes.
    """
    raw = [key.encode() for key in keys]
    return {
        "names": np.frombuffer(b"".join(raw), np.uint8),
        "name_ends": np.cumsum([len(name) for name in raw], dtype=np.int64),
        "dtypes": np.array(dtypes, np.int64),
        "num_dims": np.array([len(shape) for shape in shapes], np.int64),
        "shapes": padded(shapes, max([1, *map(len, shapes)]), 1),
    }


def padded(rows: Sequence[Sequence[int]], num_dims: int, value: int) -> Numbers:
    """Build a column of rows of at most ``num_dims`` integers; a value follows shorter ones."""
    padded = [[*row, *[value] * (num_dims - len(row))] for row in rows]
    return np.array(padded, np.int64).reshape(len(rows), num_dims)


def smallest(column: Numbers) -> Numbers:
    """Convert integers of at least 0 to the smallest unsigned dtype, little-endian."""
    dtype = np.min_scalar_type(int(column.max()) if column.size else 0)
    return column.astype(dtype.newbyteorder("<"), copy=False)
