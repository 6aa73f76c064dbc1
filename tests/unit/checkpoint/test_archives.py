"""Archives around tensors, and files that are verified while they are read."""

from __future__ import annotations

import io
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore import _core
from megacore.errors import CheckpointError
from megatrain.checkpoint import (
    archives,
    checked_files,
    find_checkpoint,
    load_checkpoint,
    load_full_weights,
    save,
)
from megatrain.checkpoint.archives import archive_of, bytes_of
from megatrain.checkpoint.checked_files import CheckedReader, FileSum
from megatrain.checkpoint.load import StoredWeights
from tests.support.checkpoints import GROUPS, save_small, small_pieces
from tests.support.checkpoints import TENSORS as TENSOR_FILE

TENSORS = [
    torch.randn(37, 5),
    torch.randn(1, 4, 3).bfloat16(),
    torch.tensor(2.5),
    torch.zeros(0, 3),
    torch.randn(300, 70).half(),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype}-{list(t.shape)}")
def test_an_archive_has_the_bytes_that_torch_writes(tensor: torch.Tensor) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        file = io.BytesIO()
        torch.save(tensor, file)
    finally:
        torch.serialization.set_crc32_options(True)
    archive = archive_of(tensor.dtype, tuple(tensor.shape))
    assert torch.serialization.get_crc32_options()  # only off while the archive is made
    content = archive.head + bytes_of(tensor) + archive.tail
    assert content == file.getvalue()
    assert archive.num_bytes == len(content)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 255, 256, 1000, 1 << 20])
def test_both_checksums_are_the_same_function(size: int) -> None:
    content = random.Random(size).randbytes(size)
    assert _core.crc32(content) == zlib.crc32(content)
    assert _core.crc32(content, 77) == zlib.crc32(content, 77)
    assert _core.crc32_combine(zlib.crc32(b"before"), zlib.crc32(content), size) == zlib.crc32(
        b"before" + content
    )


def sums_of(folder: Path) -> dict[str, FileSum]:
    return {
        path.name: FileSum(num_bytes=path.stat().st_size, crc32=zlib.crc32(path.read_bytes()))
        for path in folder.iterdir()
    }


@pytest.mark.parametrize("block_bytes", [64, 1 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_reads_verifies_all_bytes(
    seed: int, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_files, "_BLOCK_BYTES", block_bytes)
    chance = random.Random(seed)
    for name in ("a", "b", "untouched"):
        (tmp_path / name).write_bytes(chance.randbytes(3000))
    files = sums_of(tmp_path)
    reads = [
        (chance.choice("ab"), first, chance.randrange(0, 400))
        for first in (chance.randrange(0, 2600) for _ in range(12))
    ]
    # Sound first; then with one bit of any file flipped.
    for damaged in (None, "a", "b", "untouched"):
        if damaged is not None:
            content = bytearray((tmp_path / damaged).read_bytes())
            at = chance.randrange(len(content))
            content[at] ^= 1 << chance.randrange(8)
            (tmp_path / damaged).write_bytes(content)
        with CheckedReader(tmp_path, files) as reader:
            for name, first, length in reads:
                expected = (tmp_path / name).read_bytes()[first : first + length]
                assert reader.read(name, first, length) == expected
            if damaged is None:
                reader.verify()
            else:
                with pytest.raises(CheckpointError, match=rf"/{damaged} is damaged"):
                    reader.verify()
        if damaged is not None:
            content[at] = _original(files, tmp_path / damaged, content, at)
            (tmp_path / damaged).write_bytes(content)


def _original(files: dict[str, FileSum], path: Path, content: bytearray, at: int) -> int:
    for value in range(256):
        content[at] = value
        if zlib.crc32(content) == files[path.name].crc32:
            return value
    raise AssertionError("no byte has the checksum")


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    files = sums_of(tmp_path)
    (tmp_path / "a").write_bytes(b"123")
    with CheckedReader(tmp_path, files) as reader:
        with pytest.raises(CheckpointError, match="/a is cut off"):
            reader.read("a", 2, 3)
        with pytest.raises(CheckpointError, match="has 3 bytes, but was written with 5"):
            reader.verify()


@pytest.mark.parametrize("resume", ["auto", "path"])
def test_resuming_sums_each_byte_of_tensors_once(
    resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_small(tmp_path)
    summed = []

    def counted(block: memoryview, before: int = 0) -> int:
        summed.append(len(block))
        return zlib.crc32(block, before)

    monkeypatch.setattr(checked_files, "crc32", counted)
    found = find_checkpoint("auto" if resume == "auto" else str(folder), tmp_path, groups=GROUPS)
    assert found.path is not None
    load_checkpoint(found.path, small_pieces(), groups=GROUPS, verified=found.verified)
    # The index of tensors is summed once more when it is read.
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert sum(summed) == sizes[TENSOR_FILE] + sizes[".metadata"] + 2 * sizes["tensors.idx"]


def test_archives_of_another_torch_are_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load_full_weights(save_small(tmp_path / "ours"))[1]

    def with_sums(dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
        file = io.BytesIO()
        torch.save(torch.empty(shape, dtype=dtype), file)
        size = torch.empty(shape, dtype=dtype).nbytes
        start = torch._C.PyTorchFileReader(io.BytesIO(file.getvalue())).get_record_offset("data/0")
        content = file.getvalue()
        return archives.Archive(
            head=content[:start], tail=content[start + size :], num_bytes=len(content)
        )

    with monkeypatch.context() as patched:
        patched.setattr(save, "archive_of", with_sums)
        folder = save_small(tmp_path / "theirs")
    found = load_full_weights(folder)[1]
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
        whole = StoredWeights(folder)
        if whole.has_ranges(name):
            part = torch.empty(values.numel(), dtype=values.dtype)[1:]
            whole.read_range(name, 1, part)
            assert torch.equal(part, values.reshape(-1)[1:])
