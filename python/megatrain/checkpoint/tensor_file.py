"""``tensors.idx``, the file of an index of tensors.

The 8 bytes ``MEGATENS``, the length of the header (uint64), the header (JSON, with spaces at its
end), and the columns. The header ends at a multiple of 64 bytes, and each column begins at one from
there on; all numbers are unsigned and little-endian.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from megacore.errors import CheckpointError
from megatrain.checkpoint.checked_files import ADVICE, FileSum, check_content, checked_file
from megatrain.checkpoint.tensor_index import Numbers, TensorIndex, dtype_of, smallest

VERSION = 1
_MAGIC = b"MEGATENS"
_ALIGNMENT = 64
_START = len(_MAGIC) + 8
# Column -> its dimensions.
_OF_TENSORS: Mapping[str, int] = {
    "name_ends": 1,
    "dtypes": 1,
    "num_dims": 1,
    "shapes": 2,
    "box_ends": 1,
}
_OF_BOXES: Mapping[str, int] = {
    "offsets": 2,
    "sizes": 2,
    "files": 1,
    "places": 1,
    "lengths": 1,
    "heads": 1,
}
_COLUMNS: Mapping[str, int] = {"names": 1, **_OF_TENSORS, **_OF_BOXES}


def write_tensor_index(path: Path, index: TensorIndex) -> FileSum:
    """Write the file, flush it to disk and read it back.

    Raises:
        CheckpointError: If it cannot be written.
    """
    columns = {name: smallest(index.columns[name]) for name in _COLUMNS}
    described, at = {}, 0
    for name, column in columns.items():
        described[name] = {"dtype": column.dtype.str, "shape": list(column.shape), "at": at}
        at += column.nbytes + -column.nbytes % _ALIGNMENT
    header = json.dumps(
        {
            "version": VERSION,
            "dtypes": index.dtypes,
            "files": index.files,
            "columns": described,
        }
    ).encode()
    header += b" " * (-(_START + len(header)) % _ALIGNMENT)
    with checked_file(path) as file:
        file.write(_MAGIC + len(header).to_bytes(8, "little") + header)
        for column in columns.values():
            file.write(column.tobytes() + bytes(-column.nbytes % _ALIGNMENT))
    return file.sum


def read_tensor_index(path: Path, expected: FileSum, *, mapped: bool) -> TensorIndex:
    """Open the file; verify its checksum and its form, but not what it says.

    Args:
        path: The file.
        expected: Its length and checksum.
        mapped: Map the file, so that the processes of a host share its memory. It must not be
            removed meanwhile.

    Raises:
        CheckpointError: If it is missing, damaged, of another version or malformed.
    """
    check_content(path, expected)
    try:
        raw = np.memmap(path, np.uint8, mode="r") if mapped else np.fromfile(path, np.uint8)
        index = _parse(raw)
        _check_form(index)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error}") from error
    except Exception as error:  # a prepared header fails in many ways
        raise CheckpointError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    return index


def _parse(raw: Numbers) -> TensorIndex:
    if raw[: len(_MAGIC)].tobytes() != _MAGIC:
        raise CheckpointError("it is not an index of tensors")
    end = _START + int.from_bytes(raw[len(_MAGIC) : _START].tobytes(), "little")
    header = json.loads(raw[_START:end].tobytes())
    if header["version"] != VERSION:
        raise CheckpointError(
            f"it has version {header['version']!r}, this megacore reads version {VERSION}; load it "
            "with the megacore that wrote it"
        )
    columns = {}
    for name, num_dims in _COLUMNS.items():
        told = header["columns"][name]
        dtype, shape, at = np.dtype(told["dtype"]), tuple(map(int, told["shape"])), int(told["at"])
        if dtype.kind != "u" or len(shape) != num_dims or min(shape) < 0:
            raise CheckpointError(f"its column {name} has dtype {dtype} and shape {list(shape)}")
        num_bytes = math.prod(shape) * dtype.itemsize
        if at < 0 or end + at + num_bytes > len(raw):
            raise CheckpointError(f"its column {name} is cut off; {ADVICE}")
        columns[name] = raw[end + at : end + at + num_bytes].view(dtype).reshape(shape)
    return TensorIndex(
        dtypes=tuple(map(str, header["dtypes"])),
        files=tuple(map(str, header["files"])),
        columns=columns,
    )


def _check_form(index: TensorIndex) -> None:
    """Check that the columns fit each other, so that every tensor can be looked up."""
    columns, tensors, boxes = index.columns, index.num_tensors, index.num_boxes
    dims = columns["shapes"].shape[1]
    if dims < 1:
        raise CheckpointError("its tensors have no dimensions")
    for rows, names in ((tensors, _OF_TENSORS), (boxes, _OF_BOXES)):
        for name, num_dims in names.items():
            expected = (rows, dims)[:num_dims]
            if columns[name].shape != expected:
                raise CheckpointError(
                    f"its column {name} must have shape {list(expected)}, got "
                    f"{list(columns[name].shape)}"
                )
    for name, end in (("name_ends", len(columns["names"])), ("box_ends", boxes)):
        ends = columns[name].astype(np.int64)
        if (int(ends[-1]) if tensors else 0) != end or (np.diff(ends, prepend=0) < 0).any():
            raise CheckpointError(f"its column {name} does not end at {end}")
    if tensors and int(columns["num_dims"].max()) > dims:
        raise CheckpointError(f"a tensor has more than {dims} dimensions")
    if tensors and int(columns["dtypes"].max()) >= len(index.dtypes):
        raise CheckpointError("a tensor has an unknown dtype")
    for name in index.dtypes:
        dtype_of(name)
