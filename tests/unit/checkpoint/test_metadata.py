"""A prepared checkpoint runs no code, reads no other files and claims no memory."""

from __future__ import annotations

import builtins
import os
import pickle
import re
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megacore.errors import CheckpointError
from megatrain.checkpoint import load_checkpoint, load_full_weights
from tests.support.checkpoints import (
    GROUPS,
    TENSORS,
    edit_index,
    make_older,
    replace_file,
    save_small,
    small_pieces,
)


def _replace_metadata(folder: Path, raw: bytes) -> None:
    """Write ``.metadata`` with a correct checksum, as an attacker would."""
    replace_file(folder, ".metadata", raw)


def _save_older(directory: Path) -> Path:
    """Write a checkpoint that is read by its ``.metadata``."""
    return make_older(save_small(directory))


class _Call:
    """Pickles to a call of a function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def _attacks(mark: Path) -> dict[str, Any]:
    """Objects whose unpickling has an effect: it makes the file ``mark``."""
    touch = f"touch {mark}"
    return {
        "os.system": _Call(os.system, touch),
        "subprocess": _Call(subprocess.call, ["touch", str(mark)]),
        "eval": _Call(builtins.eval, f"open({str(mark)!r}, 'w')"),
        "exec": _Call(builtins.exec, f"open({str(mark)!r}, 'w')"),
        "getattr": _Call(getattr, Path, "home"),
        "torch.load": _Call(torch.load, str(mark)),
        "import": _Call(__import__, "antigravity"),
        "path": _Call(Path.touch, mark),
        "nested pickle": _Call(pickle.loads, pickle.dumps(_Call(os.system, touch))),
    }


def test_paths_of_every_python_are_read_and_none_is_written(tmp_path: Path) -> None:
    folder = _save_older(tmp_path)
    raw = (folder / ".metadata").read_bytes()
    assert b"pathlib" not in raw  # its module has another name in Python 3.13
    metadata = pickle.loads(raw)
    assert metadata.storage_meta.checkpoint_id
    metadata.storage_meta.checkpoint_id = tmp_path  # as torch's own writer stores it
    plain = re.sub(rb"cpathlib(\._local)?\n", b"cpathlib\n", pickle.dumps(metadata, protocol=2))
    for module in (b"pathlib", b"pathlib._local"):
        _replace_metadata(folder, plain.replace(b"cpathlib\n", b"c" + module + b"\n"))
        load_checkpoint(folder, small_pieces(), groups=GROUPS)


def test_members_of_enums_are_read_as_every_python_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _save_older(tmp_path)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(  # as Python 3.11.0 to 3.11.3
            _MEM_FORMAT_ENCODING,
            "__reduce_ex__",
            lambda self, _: (getattr, (type(self), self.name)),
        )
        old = pickle.dumps(metadata)
    assert b"getattr" in old
    _replace_metadata(folder, old)
    load_checkpoint(folder, small_pieces(), groups=GROUPS)


# Hand-written opcodes: names with dots, the extension registry, and persistent ids.
RAW_ATTACKS = {
    "dotted name": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c\x04true\x85R.",
    "dotted dtype": b"\x80\x04\x8c\x05torch\x8c\x14serialization.os.system\x93\x8c\x04true\x85R.",
    "torch function": b"ctorch\nload\n(S'x'\ntR.",
    "INST": b"(S'true'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'true'\no.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent id": b"Px\n.",
    "state of a class": b"ctorch.distributed.checkpoint.metadata\nMetadata\n}(S'x'\nI1\nsb.",
    "slots of a class": b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'x'\nI1\nstb.",
    "memo of 64 GiB": b"\x80\x02}r\xff\xff\xff\xff.",
    "bytes of 1 TiB": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
    "text of 1 TiB": b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b".",
    "no metadata": pickle.dumps({"state_dict_metadata": {}}),
    "deep": b"(" * 100_000 + b".",
    "empty": b"",
}


@contextmanager
def _address_space(more: int) -> Iterator[None]:
    """Limit the memory that this process can claim in addition to what it has."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _refused(folder: Path) -> str:
    with pytest.raises(CheckpointError, match=r"\.metadata") as caught:
        load_full_weights(folder)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        load_checkpoint(folder, small_pieces(), groups=GROUPS)
    return str(caught.value)


@pytest.mark.parametrize("place", ["everything", "planner data", "a key", "a size"])
def test_a_prepared_checkpoint_runs_nothing(tmp_path: Path, place: str) -> None:
    mark = tmp_path / "ran"
    for name, attack in _attacks(mark).items():
        folder = _save_older(tmp_path / name)
        metadata: Any = FileSystemReader(folder).read_metadata()
        match place:
            case "everything":
                metadata = attack
            case "planner data":
                metadata.planner_data = attack
            case "a key":
                metadata.state_dict_metadata[attack] = attack
            case "a size":
                metadata.state_dict_metadata["main_param.norm"].size = attack
        _replace_metadata(folder, pickle.dumps(metadata))
        assert "which is not part of a checkpoint" in _refused(folder), name
        assert not mark.exists(), name


@pytest.mark.parametrize("name", RAW_ATTACKS)
def test_prepared_opcodes_are_refused(tmp_path: Path, name: str) -> None:
    folder = _save_older(tmp_path)
    before = dict(vars(Metadata))
    _replace_metadata(folder, RAW_ATTACKS[name])
    with _address_space(4 << 30):
        assert "MemoryError" not in _refused(folder)
    assert dict(vars(Metadata)) == before


def _first(metadata: Metadata) -> tuple[MetadataIndex, Any]:
    return next(iter(metadata.storage_data.items()))


def _set_storage(**changes: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        index, info = _first(metadata)
        metadata.storage_data[index] = replace(info, **changes)

    return change


def _tensor(metadata: Metadata) -> TensorStorageMetadata:
    found = metadata.state_dict_metadata["main_param.norm"]
    assert isinstance(found, TensorStorageMetadata)
    return found


def _claim(metadata: Metadata) -> None:
    tensor = _tensor(metadata)
    tensor.size = tensor.chunks[0].sizes = torch.Size([1 << 50])


def _share(metadata: Metadata) -> None:
    index, info = _first(metadata)
    metadata.storage_data |= {MetadataIndex(f"x{n}", index.offset): info for n in range(100)}


CONTENTS: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "another file": (_set_storage(relative_path="/etc/passwd"), "refers to the file '/etc/passwd'"),
    "beyond the end": (_set_storage(length=1 << 60), f"beyond the end of {TENSORS}"),
    "negative offset": (_set_storage(offset=-1), f"beyond the end of {TENSORS}"),
    "transform": (_set_storage(transform_descriptors=["zstd"]), "are transformed"),
    "huge tensor": (_claim, "the files lack the values of main_param.norm"),
    "shared bytes": (_share, "share bytes of the files"),
    "gap": (lambda m: _tensor(m).chunks.clear(), "do not cover its shape"),
    "outside": (
        lambda m: setattr(_tensor(m).chunks[0], "offsets", torch.Size([1])),
        "do not cover its shape",
    ),
    "no dtype": (lambda m: setattr(_tensor(m).properties, "dtype", "x"), "must be a torch dtype"),
    "no size": (lambda m: setattr(_tensor(m), "size", ["x"]), "must be integers"),
    "bytes": (
        lambda m: m.state_dict_metadata.update(x=BytesStorageMetadata()),
        "BytesStorageMetadata",
    ),
}


@pytest.mark.parametrize(("change", "message"), CONTENTS.values(), ids=CONTENTS)
def test_metadata_must_describe_the_tensors_of_its_files(
    tmp_path: Path, change: Callable[[Metadata], None], message: str
) -> None:
    folder = _save_older(tmp_path)
    metadata = FileSystemReader(folder).read_metadata()
    change(metadata)
    _replace_metadata(folder, pickle.dumps(metadata))
    assert message in _refused(folder)


def test_files_outside_of_the_folder_are_not_opened(tmp_path: Path) -> None:
    folder = save_small(tmp_path)
    entry = {"num_bytes": 1, "crc32": 0}
    edit_index(folder, lambda data: data["files"].update({"../latest": entry}))
    with pytest.raises(CheckpointError, match="files outside of the folder"):
        load_full_weights(folder)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_torch_writes_is_read_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    folder = _save_older(tmp_path)
    expected = load_full_weights(folder)[1]
    metadata = FileSystemReader(folder).read_metadata()
    _replace_metadata(folder, pickle.dumps(metadata, protocol=protocol))
    found = load_full_weights(folder)[1]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_still_reads_what_is_written(tmp_path: Path) -> None:
    folder = save_small(tmp_path)
    state = {"main_param.norm": torch.zeros(16)}
    dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    assert torch.equal(state["main_param.norm"], load_full_weights(folder)[1]["norm"])
