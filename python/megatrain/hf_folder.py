"""Files of a Hugging Face model folder: selection, reading and writing."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megacore.errors import MegacoreError
from megatrain.files import read_ahead

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
ADAPTER_NAME = "adapter_config.json"
INDEX_NAME = "model.safetensors.index.json"
BLOCK_BYTES = 1 << 24
# Elements read at a time: 1 MiB in float32, which stays in the processor's cache until written.
_BLOCK_NUMEL = 1 << 18
_TRAINED = ("F32", "BF16", "F16")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in ``config.json`` and ``train.dtype``.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of ``config.json``.

    Raises:
        MegacoreError: If the file is missing, unreadable or not an object.
    """
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise MegacoreError(f"{folder} {found}; name the folder that holds config.json")
    if is_model_folder(folder):
        return read_object(folder / CONFIG_NAME)
    raise MegacoreError(f"{folder} has no config.json; name the folder that holds it")


def is_model_folder(path: Path) -> bool:
    """Check whether a path is a folder of Hugging Face with a model.

    Raises:
        MegacoreError: If it is the folder of an adapter.
    """
    if not is_adapter_folder(path):
        return (path / CONFIG_NAME).is_file()
    content = read_object(path / ADAPTER_NAME)
    kind = str(content.get("peft_type") or "PEFT").replace("LORA", "LoRA")
    base = content.get("base_model_name_or_path") or "an unknown model"
    raise MegacoreError(
        f"{path} is a {kind} adapter of {base}; import it first (megacore import-hf {path} OUT "
        "--base FOLDER), and name OUT"
    )


def is_adapter_folder(path: Path) -> bool:
    """Check whether a path is a folder with an adapter of PEFT."""
    return (path / ADAPTER_NAME).is_file()


def read_object(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file.

    Raises:
        MegacoreError: If the file is missing, unreadable or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MegacoreError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise MegacoreError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise MegacoreError(f"{path} must hold an object, {{...}}, got a {type(content).__name__}")
    return content


class TensorFiles:
    """Tensors of a folder, read on demand.

    The folder may have other files: an older version of the weights, or the same weights in the
    publisher's format.

    Args:
        folder: Folder with the files listed in ``model.safetensors.index.json``, else
            ``model.safetensors``, else all ``*.safetensors``.
        only: The only file to read.

    Attributes:
        formats: Supported number formats by their name in the files.

    Raises:
        MegacoreError: If a file is missing, unreadable or contradicts another one.
    """

    formats: Mapping[str, torch.dtype] = DTYPES

    def __init__(self, folder: Path, *, only: str | None = None) -> None:
        self._headers: dict[Path, tuple[int, dict[str, Any]]] = {}
        if only is not None:
            self._files = _places([folder / only])
            return
        single = folder / WEIGHTS_NAME
        if (folder / INDEX_NAME).is_file():
            self._files = _indexed_files(folder / INDEX_NAME)
            return
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
        if not files:
            raise MegacoreError(
                f"{folder} holds no *.safetensors file; save the model in that format"
            )
        self._files = _places(files)

    def keys(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._files)

    def paths(self) -> list[Path]:
        """Return the files that hold the tensors."""
        return sorted(set(self._files.values()))

    def __contains__(self, name: object) -> bool:
        """Check whether there is a tensor of this name."""
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._entry(name)[2]["shape"])

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor; see `part`."""
        return self.part(name, {})

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor.

        Raises:
            MegacoreError: If it is not supported.
        """
        return self._stored_dtype(name)

    def _stored_dtype(self, name: str) -> torch.dtype:
        path, _, entry = self._entry(name)
        dtype = self.formats.get(entry["dtype"])
        if dtype is None:
            raise MegacoreError(
                f"tensor {name} in {path} must have one of the dtypes {', '.join(DTYPES)}, got "
                f"{entry['dtype']}; convert the model to bfloat16 first"
            )
        return dtype

    def part(
        self, name: str, ranges: Mapping[int, tuple[int, int]], *, into: Tensor | None = None
    ) -> Tensor:
        """Read one tensor, or the part within these ranges of its dimensions, in its own dtype.

        Only rows in range are read. Of inner dimensions, whole rows are read, a block at a time.

        Args:
            name: The tensor.
            ranges: First index and end of dimensions.
            into: Tensor to fill and return. Default: a new one of the tensor's dtype.

        Raises:
            MegacoreError: If its file cannot be read, or it has an unsupported dtype.
        """
        dtype = self._stored_dtype(name)
        path, start, entry = self._entry(name)
        shape, begin = entry["shape"], start + entry["data_offsets"][0]
        ends = [ranges.get(dim, (0, size)) for dim, size in enumerate(shape)]
        if into is None:
            into = torch.empty([end - first for first, end in ends], dtype=dtype)
        is_direct = into.dtype == dtype and into.is_contiguous() and into.device.type == "cpu"
        if ranges.keys() <= {0} and is_direct:
            row_bytes = into.numel() * dtype.itemsize // max(1, into.shape[0]) if shape else 0
            _read_bytes(path, begin + (ends[0][0] * row_bytes if shape else 0), into)
            return into
        if not shape:
            return into.copy_(self.part(name, {}))
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        first, stop = ends[0]
        step = max(1, BLOCK_BYTES // row_bytes)
        for at in range(first, stop, step):
            block = torch.empty([min(step, stop - at), *shape[1:]], dtype=dtype)
            _read_bytes(path, begin + at * row_bytes, block)
            inner = tuple(slice(*end) for end in ends[1:])
            into[at - first : at - first + step].copy_(block[:, *inner])
        return into

    def elements(self, name: str, first: int, into: Tensor) -> None:
        """Read consecutive elements of a flattened tensor.

        Args:
            name: The tensor.
            first: The first element.
            into: Contiguous CPU tensor of one dimension, of any dtype.

        Raises:
            MegacoreError: As `part`.
        """
        dtype = self._stored_dtype(name)
        path, start, entry = self._entry(name)
        begin = start + entry["data_offsets"][0] + first * dtype.itemsize
        values = into if into.dtype == dtype else torch.empty(into.shape, dtype=dtype)
        _read_bytes(path, begin, values)
        if values is not into:
            into.copy_(values)

    def _entry(self, name: str) -> tuple[Path, int, dict[str, Any]]:
        """Return a tensor's file, the position of the first tensor in it, and its header."""
        path = self._files[name]
        if path not in self._headers:
            self._headers[path] = _read_header(path)
        start, entries = self._headers[path]
        return path, start, entries[name]

    def dtype(self) -> torch.dtype:
        """Return the most frequent dtype of matrices: float32, bfloat16 or float16."""
        counts: Counter[str] = Counter()
        for path in self.paths():
            _, entries = _read_header(path)
            counts.update(entry["dtype"] for entry in entries.values() if len(entry["shape"]) > 1)
        names = [name for name in _TRAINED if counts[name] == max(counts.values(), default=0)]
        return DTYPES[names[0]] if names else torch.float32

    def dtypes(self) -> dict[str, Any]:
        """Return the names of number formats, for a JSON file.

        Returns:
            ``default``, see `dtype`, and ``tensors``, the format of each tensor with another one.
            Values in float64 are rounded to float32 at an import.
        """
        default = dtype_name(self.dtype())
        named = {}
        for name in self.keys():
            with contextlib.suppress(MegacoreError):  # a tensor that no model can use
                dtype = self.dtype_of(name)
                named[name] = dtype_name(torch.float32 if dtype == torch.float64 else dtype)
        return {
            "default": default,
            "tensors": {name: dtype for name, dtype in named.items() if dtype != default},
        }


def _read_bytes(path: Path, begin: int, into: Tensor) -> None:
    """Fill a contiguous tensor from a position of a file."""
    # Not mapped: pages of a mapping would count as memory until the file is closed.
    view = memoryview(into.detach().view(-1).view(torch.uint8).numpy().data)
    num_read = 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(begin)
            # One call returns at most 2 GiB.
            while num_read < len(view) and (count := file.readinto(view[num_read:])):
                num_read += count
    except OSError as error:
        raise MegacoreError(f"cannot read {path}: {error.strerror}") from error
    if num_read != len(view):
        raise MegacoreError(f"cannot read {path}: it ends inside a tensor")


def _indexed_files(index: Path) -> dict[str, Path]:
    """Return the file of each tensor according to an index."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MegacoreError(f"{index} has no weight_map, from tensors to files; copy it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise MegacoreError(
                f"{index} places {name} in {file!r}, which is not the name of a file beside it"
            )
        if not (index.parent / file).is_file():
            raise MegacoreError(
                f"{index} places {name} in {file}, which does not exist; copy that file too, or "
                "remove the index if it belongs to other files"
            )
    single = index.parent / WEIGHTS_NAME
    if single.is_file() and WEIGHTS_NAME not in weight_map.values():
        raise MegacoreError(
            f"{index.parent} holds both {WEIGHTS_NAME} and {INDEX_NAME}, which names other files; "
            "remove the one that does not count"
        )
    placed = _places(index.parent / file for file in sorted(set(weight_map.values())))
    for name, file in weight_map.items():
        if name not in placed or placed[name].name != file:
            raise MegacoreError(
                f"{index} places {name} in {file}, which does not hold it; copy both again"
            )
    return placed


def _places(files: Iterable[Path]) -> dict[str, Path]:
    """Return the file of each tensor, after the library has checked each file."""
    placed: dict[str, Path] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                names = list(opened.keys())
        except (OSError, SafetensorError) as error:
            raise MegacoreError(f"cannot read {path}: {error}") from error
        for name in names:
            if name in placed:
                raise MegacoreError(
                    f"{name} is in both {placed[name]} and {path.name}; keep the files of one "
                    "model only"
                )
            placed[name] = path
    return placed


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the position of the first tensor's bytes, and the entry of each tensor."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return 8 + length, entries


def read_blocks(
    ranges: Iterable[tuple[int, int]], dtype: torch.dtype, read: Callable[[int, Tensor], None]
) -> Iterator[Tensor]:
    """Read ranges ``[first, end)`` in 1-D blocks; a block is valid until the next one.

    ``read(first, block)`` fills a block with the elements from ``first`` on, while the block before
    it is used.
    """
    blocks = [
        (at, min(_BLOCK_NUMEL, end - at))
        for first, end in ranges
        for at in range(first, end, _BLOCK_NUMEL)
    ]
    memory = torch.empty(2, max((numel for _, numel in blocks), default=0), dtype=dtype)

    def read_block(number: int) -> Tensor:
        first, numel = blocks[number]
        block = memory[number % 2, :numel]
        read(first, block)
        return block

    if len(blocks) == 1:
        yield read_block(0)
    else:
        yield from read_ahead(functools.partial(read_block, n) for n in range(len(blocks)))


# ---- writing -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name, dtype and shape of a tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    folder: Path,
    specs: Sequence[TensorSpec],
    blocks: Iterable[Iterable[Tensor]],
    *,
    max_shard_bytes: int,
) -> list[Path]:
    """Write tensors block by block, into as many files as needed, with an index if several.

    A file is full when the next tensor would exceed the limit; a larger tensor has its own file.
    The headers follow from ``specs``, so no file is held in memory.

    Args:
        folder: An existing folder.
        specs: All tensors, in the order of writing.
        blocks: For each of them, consecutive blocks of its values; any dtype and device.
        max_shard_bytes: Limit for the tensors of one file, bytes.

    Returns:
        The files of weights.
    """
    shards: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if not shards or spec.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(spec)
        room -= spec.num_bytes
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [WEIGHTS_NAME]
    values = iter(blocks)
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard, values)
    if len(shards) > 1:
        weight_map = {
            spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard
        }
        total_size = sum(spec.num_bytes for spec in specs)
        write_json(
            folder / INDEX_NAME,
            {
                "metadata": {"total_size": total_size},
                "weight_map": dict(sorted(weight_map.items())),
            },
        )
    return [folder / name for name in names]


def write_file(path: Path, specs: Sequence[TensorSpec], blocks: Iterable[Iterable[Tensor]]) -> None:
    """Write one file of tensors; arguments as `write_tensors`, which may have more blocks."""
    values = iter(blocks)
    with path.open("wb") as file:
        end = file.write(_header(specs))
        for spec in specs:
            end += spec.num_bytes
            for block in next(values):
                content = block.to(device="cpu", dtype=spec.dtype).reshape(-1)
                file.write(content.view(torch.uint8).numpy().data)
            assert file.tell() == end


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as an indented JSON file."""
    path.write_text(json_text(content), encoding="utf-8")


def json_text(content: Mapping[str, Any]) -> str:
    """Return the text of an indented JSON file."""
    return json.dumps(content, indent=2) + "\n"


def _header(specs: Sequence[TensorSpec]) -> bytes:
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for spec in specs:
        end = start + spec.num_bytes
        entries[spec.name] = {
            "dtype": names[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
