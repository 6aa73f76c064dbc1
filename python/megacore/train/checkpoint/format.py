"""What a checkpoint looks like on disk, without any communication.

A checkpoint is a folder ``step_00000100`` that holds ``index.json`` and one safetensors file per
rank that wrote something. The index describes each parameter by its global name and full shape and
lists the pieces that make it up, so any layout can read what any other layout wrote. See
``docs/checkpoints.md`` for the fields.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megacore.errors import CheckpointError
from megacore.parallel.params import ParamInfo, unshard

FORMAT = "megacore-checkpoint"
FORMAT_VERSION = 1
INDEX_NAME = "index.json"
LATEST_NAME = "latest"
PARTIAL_SUFFIX = ".partial"
# What the optimizer keeps per parameter; generation needs the first only.
MAIN_PARAM = "main_param"

_STEP_FOLDER = re.compile(r"step_(\d{8,})")
_ADVICE = 'use another checkpoint (checkpoint.resume = "auto" takes the newest complete one)'


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Where a run stands, apart from its tensors. The data order follows from these numbers.

    Attributes:
        step: Steps finished, skipped ones included; the next step has this number, from 0.
        samples: Samples consumed.
        optimizer_steps: Updates the optimizer made, which its bias correction counts.
        num_skipped: Steps skipped because of a non-finite gradient.
    """

    step: int
    samples: int
    optimizer_steps: int
    num_skipped: int = 0


@dataclass(frozen=True, kw_only=True)
class StoredPiece:
    """A range of one tensor-parallel shard of a parameter, in one file.

    Attributes:
        file: Name of the safetensors file.
        key: Key in it, after the kind of tensor and a slash.
        tp_position: Which shard.
        start: First element in the flattened shard.
        end: One past the last element.
        crc32: Checksum of the bytes of each kind of tensor.
    """

    file: str
    key: str
    tp_position: int
    start: int
    end: int
    crc32: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class StoredParam:
    """One parameter of a checkpoint.

    Attributes:
        name: Global name.
        full_shape: Shape of the whole parameter.
        tp_dim: Dimension that was split into ``tp_size`` shards; ``None`` if it was not split.
        tp_size: Number of shards.
        pieces: Ranges that tile every shard.
    """

    name: str
    full_shape: tuple[int, ...]
    tp_dim: int | None
    tp_size: int
    pieces: tuple[StoredPiece, ...]

    @property
    def info(self) -> ParamInfo:
        """The parameter as it was when it was written."""
        return ParamInfo(name=self.name, full_shape=self.full_shape, tp_dim=self.tp_dim)

    def check_complete(self) -> None:
        """Check that the pieces tile every shard.

        Raises:
            ValueError: If elements are missing or stored twice.
        """
        local_numel = math.prod(self.info.local_shape(self.tp_size))
        for position in range(self.tp_size):
            end = 0
            for piece in self.pieces_of(position):
                if piece.start != end:
                    raise ValueError(
                        f"elements {min(end, piece.start)} to {max(end, piece.start)} of "
                        f"shard {position} are {'missing' if piece.start > end else 'stored twice'}"
                    )
                end = piece.end
            if end != local_numel:
                raise ValueError(f"shard {position} has {end} of {local_numel} elements")

    def pieces_of(self, tp_position: int) -> list[StoredPiece]:
        """The pieces of one shard in the order of their elements."""
        mine = [piece for piece in self.pieces if piece.tp_position == tp_position]
        return sorted(mine, key=lambda piece: piece.start)


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex:
    """The content of ``index.json``.

    Attributes:
        state: Where the run stood.
        config: The resolved configuration of the run, as plain values.
        topology: Sizes of the layout that wrote the checkpoint; for people, loading ignores it.
        kinds: Tensors stored for each parameter, e.g. ``("main_param", "exp_avg", "exp_avg_sq")``.
        params: The parameters by name.
        files: Size in bytes of each safetensors file.
    """

    state: TrainState
    config: dict[str, Any]
    topology: dict[str, Any]
    kinds: tuple[str, ...]
    params: dict[str, StoredParam]
    files: dict[str, int]

    def to_json(self) -> str:
        """The text of ``index.json``."""
        data = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps(data, indent=1, allow_nan=False) + "\n"


def step_folder(step: int) -> str:
    """Name of the folder of a checkpoint.

    Example:
        >>> step_folder(100)
        'step_00000100'
    """
    return f"step_{step:08d}"


def step_folders(directory: Path) -> list[tuple[int, Path]]:
    """Finished checkpoint folders of a directory with their steps, oldest step first."""
    if not directory.is_dir():
        return []
    found = [
        (int(match[1]), path)
        for path in directory.iterdir()
        if (match := _STEP_FOLDER.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found)


def read_index(folder: Path) -> CheckpointIndex:
    """Read and check ``index.json`` of one checkpoint folder.

    Raises:
        CheckpointError: If it is missing, unreadable, of a newer format, or incomplete.
    """
    path = folder / INDEX_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {INDEX_NAME}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; {_ADVICE}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CheckpointError(f"{path} does not describe a checkpoint of megacore")
    version = data.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, this megacore reads version {FORMAT_VERSION}; "
            f"load it with the megacore that wrote it, or a newer one"
        )
    try:
        index = _index_from_json(data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); {_ADVICE}") from error
    for param in index.params.values():
        try:
            param.check_complete()
        except ValueError as error:
            raise CheckpointError(f"{path}: parameter {param.name}: {error}; {_ADVICE}") from error
    return index


def check_files(folder: Path, index: CheckpointIndex) -> None:
    """Check that every file of a checkpoint is there in full length.

    Raises:
        CheckpointError: Naming the first file that is not.
    """
    for name in index.files:
        check_file(folder / name, expected_bytes=index.files[name])


def check_file(path: Path, *, expected_bytes: int) -> None:
    """Check that one file is there in full length.

    Raises:
        CheckpointError: If it is not.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(
            f"checkpoint file {path} is missing ({error.strerror}); every rank must see the whole "
            f"checkpoint folder, otherwise {_ADVICE}"
        ) from error
    if size != expected_bytes:
        raise CheckpointError(
            f"checkpoint file {path} has {size:,} bytes, but was written with {expected_bytes:,}: "
            f"it was cut off or changed; {_ADVICE}"
        )


def without_advice(error: CheckpointError) -> str:
    """What is wrong, without the advice to take another checkpoint."""
    return str(error).removesuffix(_ADVICE).removesuffix("otherwise ").rstrip(";, ")


def tensor_checksum(values: Tensor) -> int:
    """CRC-32 of the bytes of a contiguous CPU tensor."""
    return zlib.crc32(values.numpy().data)


class CheckpointReader:
    """Reads parameters of one checkpoint, checking every byte it returns.

    Files are opened when they are first needed and mapped, so memory holds one parameter at a time.
    Use as a context manager.
    """

    def __init__(self, folder: Path, index: CheckpointIndex) -> None:
        self._folder = folder
        self._index = index
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def verify(self, files: Collection[str]) -> None:
        """Read everything in ``files`` and compare it with the checksums.

        Raises:
            CheckpointError: As :meth:`full`.
        """
        for param in self._index.params.values():
            for piece in param.pieces:
                if piece.file in files:
                    for kind in self._index.kinds:
                        self._read(param, piece, kind)

    def full(self, param: StoredParam, kind: str) -> Tensor:
        """One tensor of a parameter in its full shape, float32.

        Raises:
            CheckpointError: If a file is missing, cut off or unreadable, or a checksum is wrong.
        """
        local_shape = param.info.local_shape(param.tp_size)
        numel = math.prod(local_shape)
        shards = [
            self.local(param, kind, tp_position=position, start=0, end=numel).view(local_shape)
            for position in range(param.tp_size)
        ]
        return unshard(shards, param.info)

    def local(
        self, param: StoredParam, kind: str, *, tp_position: int, start: int, end: int
    ) -> Tensor:
        """Elements ``[start, end)`` of one flattened shard, float32.

        Raises:
            CheckpointError: As :meth:`full`.
        """
        out = torch.empty(end - start, dtype=torch.float32)
        for piece in param.pieces_of(tp_position):
            low, high = max(start, piece.start), min(end, piece.end)
            if low < high:
                values = self._read(param, piece, kind)
                out[low - start : high - start] = values[low - piece.start : high - piece.start]
        return out

    def _read(self, param: StoredParam, piece: StoredPiece, kind: str) -> Tensor:
        path = self._folder / piece.file
        try:
            values: Tensor = self._file(piece.file).get_tensor(f"{kind}/{piece.key}")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"cannot read {kind} of parameter {param.name} from {path}: {error}; {_ADVICE}"
            ) from error
        if values.dtype != torch.float32 or values.numel() != piece.end - piece.start:
            raise CheckpointError(
                f"{path}: {kind} of parameter {param.name} holds {values.numel()} values of "
                f"{values.dtype}, expected {piece.end - piece.start} of float32; {_ADVICE}"
            )
        if tensor_checksum(values) != piece.crc32.get(kind):
            raise CheckpointError(
                f"checkpoint file {path} is damaged: {kind} of parameter {param.name} does not "
                f"match its checksum; {_ADVICE}"
            )
        return values

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self._folder / name
            check_file(path, expected_bytes=self._index.files[name])
            self._open[name] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._open[name]


def _index_from_json(data: Mapping[str, Any]) -> CheckpointIndex:
    kinds = tuple(data["kinds"])
    files = {str(name): int(size) for name, size in data["files"].items()}
    params = {name: _param_from_json(param) for name, param in data["params"].items()}
    for name, param in params.items():
        unlisted = {piece.file for piece in param.pieces} - set(files)
        if unlisted or param.name != name:
            raise ValueError(f"parameter {name} refers to unknown files {sorted(unlisted)}")
    return CheckpointIndex(
        state=TrainState(**data["state"]),
        config=dict(data["config"]),
        topology=dict(data["topology"]),
        kinds=kinds,
        params=params,
        files=files,
    )


def _param_from_json(data: Mapping[str, Any]) -> StoredParam:
    return StoredParam(
        name=data["name"],
        full_shape=tuple(data["full_shape"]),
        tp_dim=data["tp_dim"],
        tp_size=data["tp_size"],
        pieces=tuple(StoredPiece(**piece) for piece in data["pieces"]),
    )
