"""Restricted reader of ``.metadata``, the pickle of `torch.distributed.checkpoint`.

A pickle can call any function that it names. This reader resolves only the names that torch writes,
to inert records, and then builds torch's metadata from checked values. A prepared file therefore
cannot run code, refer to other files, or claim more memory than its tensor files have.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megacore.errors import CheckpointError
from megatrain.checkpoint.checked_files import ADVICE, FileSum, check_content
from megatrain.checkpoint.format import INDEX_NAME, METADATA_NAME, CheckpointIndex
from megatrain.checkpoint.tensor_index import TensorIndex, padded, tensor_columns
from megatrain.files import PlainUnpickler


def read_metadata(folder: Path, index: CheckpointIndex) -> Metadata:
    """Read the tensor metadata of `torch.distributed.checkpoint`, without running its code.

    Raises:
        CheckpointError: If the metadata is missing, damaged, unreadable, contains anything besides
            descriptions of tensors, or describes tensors that the files do not contain.
    """
    path = folder / METADATA_NAME
    if METADATA_NAME not in index.files:
        raise CheckpointError(f"{folder / INDEX_NAME} does not list {METADATA_NAME}; {ADVICE}")
    check_content(path, index.files[METADATA_NAME])
    try:
        return _to_metadata(_Unpickler(io.BytesIO(path.read_bytes())).load(), index.files)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error}") from error
    except KeyError as error:
        raise CheckpointError(f"cannot read {path}: unknown opcode or name {error}") from error
    except Exception as error:  # an invalid pickle, or one of another torch, fails in many ways
        raise CheckpointError(f"cannot read {path}: {type(error).__name__}: {error}") from error


def index_of_metadata(metadata: Metadata) -> TensorIndex:
    """Convert checked metadata into columns."""
    tensors = [
        (key, tensor)
        for key, tensor in sorted(metadata.state_dict_metadata.items())
        if isinstance(tensor, TensorStorageMetadata)
    ]
    names = [str(tensor.properties.dtype).removeprefix("torch.") for _, tensor in tensors]
    dtypes = sorted(set(names))
    boxes = [
        (key, box)
        for key, tensor in tensors
        for box in sorted(tensor.chunks, key=lambda box: box.offsets)
    ]
    places = [metadata.storage_data[MetadataIndex(key, box.offsets)] for key, box in boxes]
    files = sorted({place.relative_path for place in places})
    numbers = {name: number for number, name in enumerate(files)}
    of_tensors = tensor_columns(
        [key for key, _ in tensors],
        [dtypes.index(name) for name in names],
        [tuple(tensor.size) for _, tensor in tensors],
    )
    num_dims = of_tensors["shapes"].shape[1]
    of_boxes = {
        "files": [numbers[place.relative_path] for place in places],
        "places": [place.offset for place in places],
        "lengths": [place.length for place in places],
        "heads": [0] * len(places),
    }
    return TensorIndex(
        dtypes=dtypes,
        files=files,
        columns={
            **of_tensors,
            "box_ends": np.cumsum([len(tensor.chunks) for _, tensor in tensors], dtype=np.int64),
            "offsets": padded([tuple(box.offsets) for _, box in boxes], num_dims, 0),
            "sizes": padded([tuple(box.sizes) for _, box in boxes], num_dims, 1),
            **{name: np.array(column, np.int64) for name, column in of_boxes.items()},
        },
    )


class _Record:
    """Stand-in for the dataclasses of torch: holds a state, and does nothing."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    # Also keeps the pickle from setting attributes of this class.
    def __setstate__(self, state: Any) -> None:
        self.state = state


_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    # The folder that was written to, in `StorageMeta`.
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),  # of Python 3.13
    ("pathlib._local", "WindowsPath"),
}
_VALUES: Mapping[tuple[str, str], type] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): int,
}


def _enum_member(kind: type, name: str) -> int:
    """Stand-in for ``getattr``, by which Python 3.11.0 to 3.11.3 pickles members of enums."""
    if kind is not int or name not in _MEM_FORMAT_ENCODING.__members__:
        raise CheckpointError(f"it refers to an unknown attribute {name!r} of {kind!r}")
    return int(_MEM_FORMAT_ENCODING[name].value)


class _Unpickler(PlainUnpickler):
    """Unpickler of the few names that torch's metadata consists of."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return _Record
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        value = getattr(torch, name, None) if module == "torch" and "." not in name else None
        if isinstance(value, torch.dtype):
            return value
        raise CheckpointError(
            f"it refers to {module!r}.{name!r}, which is not part of a checkpoint; load it only "
            f"with the program that wrote it, and only if you trust its source"
        )


def _to_metadata(record: Any, files: Mapping[str, FileSum]) -> Metadata:
    """Build metadata from records, checked against the files of the checkpoint."""
    tensors = {
        str(key): _to_tensor(str(key), tensor.state)
        for key, tensor in record.state["state_dict_metadata"].items()
    }
    storage = {
        MetadataIndex(str(index.state["fqn"]), _size(index.state["offset"])): _to_storage(
            info.state, files
        )
        for index, info in record.state["storage_data"].items()
    }
    if sum(info.length for info in storage.values()) > sum(f.num_bytes for f in files.values()):
        raise CheckpointError("its tensors share bytes of the files")
    for key, tensor in tensors.items():
        itemsize = tensor.properties.dtype.itemsize
        for chunk in tensor.chunks:
            stored = storage.get(MetadataIndex(key, chunk.offsets))
            if stored is None or stored.length < math.prod(chunk.sizes) * itemsize:
                raise CheckpointError(
                    f"the files lack the values of {key} from {list(chunk.offsets)} on"
                )
    return Metadata(state_dict_metadata=dict(tensors), storage_data=storage)


def _to_tensor(key: str, state: Mapping[str, Any]) -> TensorStorageMetadata:
    dtype, size = state["properties"].state[0], _size(state["size"])
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the dtype of {key} must be a torch dtype, got {dtype!r}")
    chunks = [
        ChunkStorageMetadata(
            offsets=_size(chunk.state["offsets"]), sizes=_size(chunk.state["sizes"])
        )
        for chunk in state["chunks"]
    ]
    inside = all(
        len(chunk.offsets) == len(chunk.sizes) == len(size)
        and all(
            first + count <= whole
            for first, count, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
        )
        for chunk in chunks
    )
    are_distinct = len({chunk.offsets for chunk in chunks}) == len(chunks)
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    if not inside or not are_distinct or covered != math.prod(size):
        raise CheckpointError(f"the boxes of {key} do not cover its shape {list(size)}")
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=size, chunks=chunks)


def _to_storage(state: Mapping[str, Any], files: Mapping[str, FileSum]) -> _StorageInfo:
    name, offset, length = state["relative_path"], state["offset"], state["length"]
    if name not in files:
        raise CheckpointError(f"it refers to the file {name!r}, which {INDEX_NAME} does not list")
    if min(offset, length) < 0 or offset + length > files[name].num_bytes:
        raise CheckpointError(f"it refers to bytes beyond the end of {name}")
    if state.get("transform_descriptors"):
        raise CheckpointError("its tensors are transformed, which is not supported")
    return _StorageInfo(relative_path=name, offset=offset, length=length)


def _size(numbers: Any) -> torch.Size:
    if any(not isinstance(number, int) or number < 0 for number in numbers):
        raise CheckpointError(f"{numbers!r} must be integers of at least 0")
    return torch.Size(numbers)
