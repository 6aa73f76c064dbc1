"""Damaged files are never loaded silently, and failing disk calls lose no checkpoint."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.errors import CheckpointError
from megatrain.checkpoint import checked_files, find_checkpoint, load_checkpoint, load_full_weights
from tests.support.campaigns import representatives
from tests.support.checkpoints import (
    GROUPS,
    NORM,
    WEIGHT,
    make_older,
    make_pieces,
    replace_file,
    save_small,
)

# ---- damaged files -------------------------------------------------------------------------------

Bytes = dict[str, bytes]


def _flip(raw: bytearray, chance: random.Random) -> None:
    raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)


def _cut(raw: bytearray, chance: random.Random) -> None:
    del raw[chance.randrange(len(raw)) :]


def _erase(raw: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(raw))
    end = min(len(raw), start + chance.choice([1, 16, 512, 4096]))
    raw[start:end] = bytes(end - start)


def _insert(raw: bytearray, chance: random.Random) -> None:
    raw[(place := chance.randrange(len(raw))) : place] = chance.randbytes(chance.choice([1, 4, 64]))


def _move(raw: bytearray, chance: random.Random) -> None:
    size = chance.choice([1, 8, 64])
    a, b = chance.randrange(len(raw)), chance.randrange(len(raw))
    raw[a : a + size], raw[b : b + size] = raw[b : b + size], raw[a : a + size]


def _append(raw: bytearray, chance: random.Random) -> None:
    raw += chance.randbytes(chance.choice([1, 64]))


DAMAGES = [_flip, _cut, _erase, _insert, _move, _append]


def _read_all(folder: Path) -> Bytes:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _state(folder: Path) -> tuple[dict[str, Tensor], ...]:
    """Everything that a checkpoint has, loaded in both ways."""
    pieces = make_pieces([WEIGHT, NORM], tp=(0, 1), dp=(0, 1), filled=False)
    state = load_checkpoint(folder, pieces, groups=GROUPS)
    numbers = {"step": torch.tensor([state.step, state.samples, state.optimizer["step_count"]])}
    return (numbers, load_full_weights(folder)[1], *(dict(piece.tensors) for piece in pieces))


def _same(a: tuple[dict[str, Tensor], ...], b: tuple[dict[str, Tensor], ...]) -> bool:
    return all(
        x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize(("seed", "count"), representatives([(0, 60), (1, 2400)], [(0, 60)]))
def test_no_damage_is_loaded_silently(tmp_path: Path, seed: int, count: int) -> None:
    chance = random.Random(seed)
    older = _read_all(save_small(tmp_path, step=2, keep=2))
    folder = save_small(tmp_path, step=3, keep=2)
    good, expected = _read_all(folder), _state(folder)
    refused: dict[str, int] = {}
    for number in range(count):
        name = chance.choice(sorted(good))
        raw = bytearray(good[name])
        damage = chance.choice([*DAMAGES, None])
        if damage is None:  # a file of another step, or none
            raw = bytearray(chance.choice([older[name], b""]))
        else:
            damage(raw, chance)
        if raw == good[name]:
            continue
        (folder / name).write_bytes(raw)
        what = (seed, number, name, getattr(damage, "__name__", "replaced"))
        complaint = ""
        with contextlib.suppress(CheckpointError):
            _state(folder)
            complaint = "loaded silently"
        assert not complaint, what
        refused[name] = refused.get(name, 0) + 1
        if number % 40 == 0:  # the older checkpoint takes its place
            found = find_checkpoint("auto", tmp_path, groups=GROUPS)
            assert found.path == tmp_path / "step_00000002", what
        (folder / name).write_bytes(good[name])
    assert _same(_state(folder), expected)
    print(f"{sum(refused.values())} damaged files refused: {refused}")
    assert refused.keys() == good.keys()


@pytest.mark.parametrize(("seed", "count"), representatives([(0, 30), (1, 600)], [(0, 30)]))
@pytest.mark.parametrize("name", [".metadata", "tensors.idx"])
def test_damaged_metadata_with_a_correct_checksum_is_refused_or_harmless(
    tmp_path: Path, seed: int, count: int, name: str
) -> None:
    chance = random.Random(seed)
    folder = save_small(tmp_path, step=3)
    if name == ".metadata":
        make_older(folder)
    good = _read_all(folder)
    refused = 0
    for _ in range(count):
        raw = bytearray(good[name])
        for _ in range(chance.choice([1, 1, 3])):
            chance.choice([_flip, _erase, _insert, _move])(raw, chance)
        replace_file(folder, name, bytes(raw))
        try:
            _state(folder)
        except CheckpointError:
            refused += 1
        (folder / "index.json").write_bytes(good["index.json"])
    print(f"{refused} of {count} refused")
    assert refused > count // 2


# ---- failing disk calls --------------------------------------------------------------------------

_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}


class _Disk:
    """Lets one call for a path in a folder fail."""

    def __init__(self) -> None:
        self.folder = ""
        self.number = 0
        self.fails_at = 0
        self.count = 0
        self.failed = ""

    def called(self, what: str, path: object) -> None:
        if not self.folder or not str(path).startswith(self.folder):
            return
        self.count += 1
        if self.count == self.fails_at:
            self.failed = f"{what} {path}"
            raise OSError(self.number, os.strerror(self.number), str(path))

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder and event in _EVENTS and arguments:
            self.called(event, os.fspath(arguments[0]) if _is_path(arguments[0]) else "")

    @contextmanager
    def failing(self, folder: Path, number: int, fails_at: int) -> Iterator[None]:
        self.number, self.fails_at, self.count, self.failed = number, fails_at, 0, ""
        self.folder = str(folder)
        try:
            yield
        finally:
            self.folder = ""


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


DISK = _Disk()
_AUDITED: list[bool] = []


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> _Disk:
    """The disk of this test process; an audit hook cannot be removed, only be idle."""
    if not _AUDITED:
        sys.addaudithook(DISK.audit)
        _AUDITED.append(True)
    num_writes: dict[Any, int] = {}
    real_fsync, real_write = os.fsync, checked_files.ChecksumFile.write

    def fsync(descriptor: int) -> None:
        DISK.called("fsync", Path(f"/proc/self/fd/{descriptor}").readlink())
        real_fsync(descriptor)

    def write(file: Any, data: Any) -> int:
        num_writes[file] = num_writes.get(file, 0) + 1
        if num_writes[file].bit_count() == 1:  # of many small writes some
            DISK.called("write", file.raw.name)
        return real_write(file, data)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(checked_files.ChecksumFile, "write", write)
    return DISK


SCENES: dict[str, Callable[[Path], object]] = {
    "the next step": lambda folder: save_small(folder, step=2, keep=1),
    "the next step, two kept": lambda folder: save_small(folder, step=2, keep=2),
    "the same step": lambda folder: save_small(folder, step=1, keep=1),
}
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE)
CASES = [(scene, number) for scene in SCENES for number in ERRORS]


@pytest.mark.parametrize(
    ("scene", "number"), representatives(CASES, [("the next step", errno.EIO)])
)
def test_a_failing_disk_call_loses_no_checkpoint(
    tmp_path: Path, disk: _Disk, scene: str, number: int
) -> None:
    first = tmp_path / "first"
    save_small(first, step=1, keep=1)
    outcomes = []
    for fails_at in range(1, 500):
        folder = tmp_path / str(fails_at)
        shutil.copytree(first, folder)
        complaint = ""
        with disk.failing(folder, number, fails_at):
            try:
                SCENES[scene](folder)
            except CheckpointError as error:
                complaint = str(error)
        if not disk.failed:
            break
        outcomes.append((disk.failed.partition(" ")[0], bool(complaint)))
        found = find_checkpoint("auto", folder, groups=GROUPS)
        assert found.path is not None, disk.failed
        assert not found.skipped, disk.failed
        step = int(_state(found.path)[0]["step"][0])
        assert step == (2 if "next" in scene and not complaint else step), disk.failed
        assert "\n" not in complaint
        if complaint:
            assert os.strerror(number) in complaint, disk.failed
        SCENES[scene](folder)  # the next save cleans up
        assert not list(folder.glob("*.partial"))
        shutil.rmtree(folder)
    told = sum(told for _, told in outcomes)
    print(f"{len(outcomes)} calls failed, {told} with an error: {outcomes}")
    assert len(outcomes) > 30
    assert told > 25
