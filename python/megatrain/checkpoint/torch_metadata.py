"""``.metadata``, the pickle of `torch.distributed.checkpoint`, written from columns.

As objects, the boxes of 16,384 ranks take half a minute and gigabytes to pickle. But their pickles
differ only in numbers: the pickle of one box, with the columns in place of its numbers, is that of
all boxes.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatrain.checkpoint.checked_files import FileSum, checked_file
from megatrain.checkpoint.tensor_index import Numbers, TensorIndex, dtype_of

# Boxes whose bytes are in memory at once.
_BATCH = 1 << 14
# A number and a text that a template holds in place of those of a box. The numbers take 8 bytes.
_NUMBER = 0x7A5A5A5A5A5A5A00
_TEXT = "\0{}\0"
# Number of the first text in the memo; names of classes and attributes have those below.
_TEXTS = 256
_LONG = pickle.LONG1 + b"\x08"


def write_torch_metadata(path: Path, index: TensorIndex, meta: StorageMeta) -> FileSum:
    """Write ``.metadata``, so that tools of torch can read the folder.

    Raises:
        CheckpointError: If it cannot be written.
    """
    with checked_file(path) as file:
        for block in _blocks(index, meta):
            file.write(block)
    return file.sum


def _blocks(index: TensorIndex, meta: StorageMeta) -> Iterator[bytes]:
    """Yield the pickle, in blocks."""
    memo = _Memo()
    keys = [index.key(number) for number in range(index.num_tensors)]
    kinds = [
        _Kind(memo, index, dims, dtype)
        for dims in np.unique(index.columns["num_dims"]).tolist()
        for dtype in range(len(index.dtypes))
    ]
    yield pickle.PROTO + b"\x02" + memo.code()
    for first in range(0, len(keys) + len(index.files), _BATCH):
        texts = (*keys, *index.files)[first : first + _BATCH]
        yield b"".join(_plain(text) + _put(_TEXTS + first + at) for at, text in enumerate(texts))
    yield _object_head(Metadata) + _plain("state_dict_metadata") + pickle.EMPTY_DICT
    for kind in kinds:
        yield from kind.tensors()
    yield _plain("planner_data") + pickle.EMPTY_DICT
    # For generic readers, which rebuild {"main_param": {"layers.0.norm": ...}, ...}.
    for first in range(0, len(keys), _BATCH):
        batch = range(first, min(len(keys), first + _BATCH))
        names = (_get(_TEXTS + at) + _plain(tuple(keys[at].split(".", 1))) for at in batch)
        yield pickle.MARK + b"".join(names) + pickle.SETITEMS
    yield _plain("storage_data") + pickle.EMPTY_DICT
    for kind in kinds:
        yield from kind.places()
    rest = (("storage_meta", meta), ("version", CURRENT_DCP_VERSION))
    yield b"".join(_plain(name) + _plain(value) for name, value in rest)
    yield pickle.SETITEMS + pickle.BUILD + pickle.STOP


class _Kind:
    """Tensors of one dtype and number of dimensions, whose code differs in numbers only."""

    def __init__(self, memo: _Memo, index: TensorIndex, dims: int, dtype: int) -> None:
        columns = index.columns
        self._index = index
        self._dims = dims
        chosen = (columns["num_dims"] == dims) & (columns["dtypes"] == dtype)
        self._tensors = np.flatnonzero(chosen)
        counts = index.num_boxes_of_tensors()
        self._counts = counts[self._tensors]
        self._of_boxes = np.repeat(np.arange(len(counts)), counts)
        self._boxes = np.flatnonzero(chosen[self._of_boxes])
        numbers = range(_NUMBER, _NUMBER + 2 * dims + 2)
        offsets, sizes = torch.Size(numbers[:dims]), torch.Size(numbers[dims : 2 * dims])
        properties = TensorProperties(dtype=dtype_of(index.dtypes[dtype]))
        self._tensor = _Template(
            memo,
            _plain(_TEXT.format(0))
            + _object_head(TensorStorageMetadata)
            + b"".join(map(_plain, ("properties", properties, "size", offsets, "chunks")))
            + pickle.EMPTY_LIST,
        )
        self._chunk = _Template(memo, _plain(ChunkStorageMetadata(offsets=offsets, sizes=sizes)))
        place, length = numbers[dims : dims + 2]
        at = _StorageInfo(relative_path=_TEXT.format(1), offset=place, length=length)
        self._place = _Template(memo, _plain(MetadataIndex(_TEXT.format(0), offsets)) + _plain(at))

    def tensors(self) -> Iterator[bytes]:
        """Yield the items of ``state_dict_metadata``."""
        columns, dims = self._index.columns, self._dims
        ends, first = np.cumsum(self._counts), 0
        while first < len(ends):
            start = int(ends[first - 1]) if first else 0
            end = max(first + 1, int(np.searchsorted(ends, start + _BATCH, side="right")))
            batch, rows = self._tensors[first:end], self._boxes[start : int(ends[end - 1])]
            heads = self._tensor.fill(
                len(batch), columns["shapes"][batch, :dims].T, [_TEXTS + batch]
            )
            boxes = self._chunk.fill(
                len(rows), [*columns["offsets"][rows, :dims].T, *columns["sizes"][rows, :dims].T]
            )
            parts = [pickle.MARK]
            for head, of_tensor in zip(
                heads, np.split(boxes, ends[first : end - 1] - start), strict=True
            ):
                parts += [head.tobytes(), pickle.MARK, of_tensor.tobytes(), pickle.APPENDS]
                parts += [pickle.SETITEMS, pickle.BUILD]
            yield b"".join((*parts, pickle.SETITEMS))
            first = end

    def places(self) -> Iterator[bytes]:
        """Yield the items of ``storage_data``."""
        columns, first_file = self._index.columns, _TEXTS + self._index.num_tensors
        for first in range(0, len(self._boxes), _BATCH):
            rows = self._boxes[first : first + _BATCH]
            numbers = [*columns["offsets"][rows, : self._dims].T]
            numbers += [columns["places"][rows], columns["lengths"][rows]]
            files = first_file + columns["files"][rows].astype(np.int64)
            items = self._place.fill(len(rows), numbers, [_TEXTS + self._of_boxes[rows], files])
            yield pickle.MARK + items.tobytes() + pickle.SETITEMS


class _Memo:
    """Names of classes and attributes, which the code refers to by numbers of one byte."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def shorten(self, code: bytes) -> bytes:
        """Replace names by references."""
        starts = [(position, op.name) for op, _, position in pickletools.genops(code + pickle.STOP)]
        parts = []
        for (start, name), (end, _) in pairwise(starts):
            part = code[start:end]
            is_name = name == "BINUNICODE" and not part[5:].startswith(b"\0")
            if is_name or name == "GLOBAL":
                number = self._numbers.setdefault(part, len(self._numbers))
                part = pickle.BINGET + bytes([number])
            parts.append(part)
        return b"".join(parts)

    def code(self) -> bytes:
        """Return the code that stores the names."""
        return b"".join(name + _put(number) for name, number in self._numbers.items())


class _Template:
    """Code of many objects that differ in numbers and texts.

    Args:
        memo: Names of classes and attributes.
        code: Code of one object, with the numbers ``_NUMBER``, ``_NUMBER + 1``, … and the texts
            ``_TEXT.format(0)``, ….
    """

    def __init__(self, memo: _Memo, code: bytes) -> None:
        code = memo.shorten(code)
        self._numbers: list[int] = []
        self._texts: list[int] = []
        while (text := _plain(_TEXT.format(len(self._texts)))) in code:
            self._texts.append(code.index(text) + 1)
            code = code.replace(text, _get(0))
        while (number := _LONG + struct.pack("<q", _NUMBER + len(self._numbers))) in code:
            self._numbers.append(code.index(number) + len(_LONG))
        self._code = np.frombuffer(code, np.uint8)

    def fill(
        self, count: int, numbers: Iterable[Numbers], texts: Iterable[Numbers] = ()
    ) -> Numbers:
        """Return the code of objects, uint8, ``(count, L)``.

        Args:
            count: Number of objects.
            numbers: Their numbers, each ``(count,)``.
            texts: Numbers of their texts in the memo, each ``(count,)``.
        """
        filled = np.tile(self._code, (count, 1))
        for places, columns, dtype in (
            (self._numbers, numbers, "<i8"),
            (self._texts, texts, "<u4"),
        ):
            width = np.dtype(dtype).itemsize
            for place, column in zip(places, columns, strict=True):
                raw = np.ascontiguousarray(column, dtype).view(np.uint8)
                filled[:, place : place + width] = raw.reshape(-1, width)
        return filled


def _plain(value: Any) -> bytes:
    """Pickle a value without references, version and end."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=2)
    pickler.fast = True
    pickler.dump(value)
    return stream.getvalue()[2:-1]


def _object_head(cls: type) -> bytes:
    """Return the code of an object up to its attributes; ``SETITEMS`` and ``BUILD`` end it."""
    code = pickle.GLOBAL + f"{cls.__module__}\n{cls.__qualname__}\n".encode()
    return code + pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK


def _put(number: int) -> bytes:
    return pickle.LONG_BINPUT + struct.pack("<I", number) + pickle.POP


def _get(number: int) -> bytes:
    return pickle.LONG_BINGET + struct.pack("<I", number)
