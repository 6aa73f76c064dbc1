"""What happens where a checkpoint cannot be written: what is said, and what is left behind."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacore.errors import CheckpointError
from megacore.optim import ParamPiece
from megacore.parallel.process_groups import ProcessGroups
from megatrain.checkpoint import (
    TrainState,
    check_checkpoint_folder,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from megatrain.checkpoint import checked_files as files_module
from megatrain.checkpoint import publish as publish_module
from megatrain.checkpoint import save as save_module
from tests.support.checkpoints import (
    GROUPS,
    NORM,
    TENSORS,
    WEIGHT,
    ThreadWorld,
    make_pieces,
    names_in,
    save_small,
    small_pieces,
)
from tests.support.jobs import start_function

# ---- found before the first step ---------------------------------------------------------------


def test_probing_makes_the_folder_and_leaves_it_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = ThreadWorld(monkeypatch, tp=2, dp=2)
    world.run(lambda groups: _probe(tmp_path / "a" / "b", groups))
    assert names_in(tmp_path / "a" / "b") == []


def test_a_folder_that_cannot_be_written_is_found_by_probing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("")
    world = ThreadWorld(monkeypatch, tp=2, dp=2)

    def message(groups: ProcessGroups) -> str:
        with pytest.raises(CheckpointError) as caught:
            _probe(tmp_path / "taken" / "checkpoints", groups)
        return str(caught.value)

    [told] = set(world.run(message))
    where = tmp_path / "taken" / "checkpoints"
    assert told.startswith(f"cannot write checkpoints to {where} (checkpoint.dir): Not a directory")


def test_a_folder_that_is_not_shared_is_found_by_probing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = ThreadWorld(monkeypatch, tp=1, dp=2)

    def message(groups: ProcessGroups) -> str:
        with pytest.raises(CheckpointError) as caught:
            _probe(tmp_path / str(groups.rank), groups)  # as if the ranks were on two machines
        return str(caught.value)

    [told] = set(world.run(message))
    assert told.startswith("rank 0 does not see what rank 1 writes to ")


def test_a_full_disk_is_found_by_probing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        publish_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000)
    )
    with pytest.raises(CheckpointError, match=r"it takes 1\.1 MB, but .* has 1\.0 MB left"):
        _probe(tmp_path, GROUPS)
    assert names_in(tmp_path) == []


def _probe(directory: Path, groups: ProcessGroups) -> None:
    check_checkpoint_folder(directory, num_bytes=3264, groups=groups)


# ---- failing to write --------------------------------------------------------------------------


def test_a_full_disk_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_small(tmp_path, step=1)
    usage = SimpleNamespace(free=1_000_000)
    monkeypatch.setattr(publish_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"it takes 1\.1 MB, but .* has 1\.0 MB left"):
        save_small(tmp_path, step=2)
    assert names_in(tmp_path) == ["latest", "step_00000001"]


def test_a_rank_that_cannot_write_stops_all_ranks_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FailingFile(files_module.ChecksumFile):
        def write(self, data: Any, /) -> int:
            if "__2_" in str(self.raw.name):
                raise OSError(28, "No space left on device", str(self.raw.name))
            return super().write(data)

    monkeypatch.setattr(files_module, "ChecksumFile", FailingFile)
    world = ThreadWorld(monkeypatch, tp=2, dp=2)
    messages = world.run(lambda groups: _message_of_saving(tmp_path, groups))
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"rank 2: cannot write {tmp_path}/step_00000001.partial/__2_0")
    assert "No space left" in messages[0]
    assert names_in(tmp_path) == []


def _message_of_saving(directory: Path, groups: ProcessGroups) -> str:
    pieces = make_pieces([WEIGHT, NORM], tp=(groups.tp.position, 2), dp=(groups.dp.position, 2))
    state = TrainState(step=1, samples=8, optimizer={})
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(directory, pieces, state=state, config={}, groups=groups)
    return str(caught.value)


def test_a_disk_that_fills_while_writing_is_named_as_the_cause(tmp_path: Path) -> None:
    def fill(limit: int) -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(CheckpointError) as caught:
            save_small(tmp_path)
        where = tmp_path / "step_00000003.partial" / TENSORS
        sentence = f"cannot write {where}: File too large; check the disk, or set checkpoint.dir"
        return 0 if str(caught.value).startswith(sentence) and not names_in(tmp_path) else 1

    for limit in (100, 1500, 4000):  # before, in and after the first tensor
        ended = start_function(partial(fill, limit), tmp_path.parent).finish(timeout_s=60)
        assert (ended.code, ended.err) == (0, "")


def test_a_directory_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(CheckpointError, match=r"(File exists|Not a directory): .*taken"):
        save_small(tmp_path / "taken")


def test_ranks_without_a_shared_disk_are_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = save_module._write_mine

    def write_elsewhere(*args: Any) -> Any:
        written = real_write(*args)
        shutil.rmtree(args[0].parent)
        args[0].parent.mkdir()
        return written

    monkeypatch.setattr(save_module, "_write_mine", write_elsewhere)
    with pytest.raises(CheckpointError, match="must be on a file system that all ranks share"):
        save_small(tmp_path)


def test_a_bug_on_one_rank_does_not_leave_the_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = save_module._write_mine

    def broken(path: Path, *args: Any) -> Any:
        if path.name.startswith("__1_"):
            raise KeyError("bug")
        return write(path, *args)

    monkeypatch.setattr(save_module, "_write_mine", broken)
    world = ThreadWorld(monkeypatch, tp=1, dp=2)

    def save(groups: ProcessGroups) -> str:
        pieces = make_pieces([NORM], tp=(0, 1), dp=(groups.dp.position, 2))
        state = TrainState(step=1, samples=8, optimizer={})
        with pytest.raises((CheckpointError, KeyError)) as caught:
            save_checkpoint(tmp_path, pieces, state=state, config={}, groups=groups)
        return type(caught.value).__name__

    assert world.run(save) == ["CheckpointError", "KeyError"]


def _flip(file: int, size: int) -> None:
    byte = os.pread(file, 1, size // 2)[0]
    os.pwrite(file, bytes([byte ^ 1]), size // 2)


FAULTS: dict[str, Callable[[int, int], None]] = {
    "flipped bit": _flip,
    "lost write": lambda file, _: os.ftruncate(file, 0),
    "short write": lambda file, size: os.ftruncate(file, size - 1),
}


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("name", [TENSORS, ".metadata", "index.json", "latest.partial"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_file_that_reads_back_differently_is_not_published(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[int, int], None],
    name: str,
    keep: int,
) -> None:
    save_small(tmp_path, step=1, keep=keep)
    real_fsync = os.fsync

    def damage_and_flush(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.name == name:
            file = os.open(path, os.O_RDWR)
            fault(file, path.stat().st_size)
            os.close(file)
        real_fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", damage_and_flush)
        with pytest.raises(CheckpointError, match="differs from the data that was written") as told:
            save_small(tmp_path, step=2, keep=keep)
    assert name in str(told.value)
    assert "set checkpoint.dir to another one" in str(told.value)
    assert names_in(tmp_path) == ["latest", "step_00000001"]
    load_checkpoint(
        find_checkpoint("auto", tmp_path, groups=GROUPS).path, small_pieces(), groups=GROUPS
    )


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_every_failing_flush_names_its_file_and_keeps_the_former_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real_fsync = os.fsync
    flushed: list[str] = []

    def fail_at(position: int) -> Callable[[int], None]:
        flushed.clear()

        def fsync(descriptor: int) -> None:
            flushed.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
            if len(flushed) == position:
                raise OSError(number, os.strerror(number))
            real_fsync(descriptor)

        return fsync

    for position in range(1, 20):
        directory = tmp_path / str(position)
        save_small(directory, step=1, keep=1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail_at(position))
            try:
                save_small(directory, step=2, keep=1)
            except CheckpointError as error:
                sentence = str(error)
            else:
                break
        assert f"cannot write {flushed[-1]}: {os.strerror(number)}; " in sentence
        assert "checkpoint.dir" in sentence
        found = find_checkpoint("auto", directory, groups=GROUPS)
        load_checkpoint(found.path, small_pieces(), groups=GROUPS)
    assert position > 6  # tensors, metadata, index, its folder, latest, the folder twice, ...


def test_a_kill_while_the_same_step_is_replaced_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_small(tmp_path, step=3)

    real_rename = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial") and target.name == "step_00000003":
            raise KeyboardInterrupt  # between the two renames
        return real_rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            save_small(tmp_path, step=3)
    found = find_checkpoint("auto", tmp_path, groups=GROUPS)
    assert found.path == tmp_path / "step_00000003.replaced"
    load_checkpoint(tmp_path, small_pieces(), groups=GROUPS)
    save_small(tmp_path, step=3)
    assert names_in(tmp_path) == ["latest", "step_00000003"]


def test_pieces_with_a_hole_are_our_own_bug(tmp_path: Path) -> None:
    [whole] = make_pieces([NORM], tp=(0, 1), dp=(0, 1))
    tensors = {kind: values[:4] for kind, values in whole.tensors.items()}
    half = ParamPiece(info=NORM, start=0, end=4, tensors=tensors)
    state = TrainState(step=1, samples=8, optimizer={})
    with pytest.raises(
        RuntimeError, match=r"not write each element once: the boxes of exp_avg\.norm do not cover"
    ):
        save_checkpoint(tmp_path, [half], state=state, config={}, groups=GROUPS)
