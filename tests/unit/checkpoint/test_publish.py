"""Folders of checkpoints come and go by renames: killed before any of them, a run loses nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megacore.parallel.param_info import ParamInfo
from megacore.parallel.process_groups import ProcessGroups
from megatrain.checkpoint import TrainState, find_checkpoint, read_index, save_checkpoint
from megatrain.checkpoint import publish as publish_module
from tests.support.checkpoints import make_pieces

GROUPS = ProcessGroups.single()
PIECES = make_pieces([ParamInfo(name="norm", full_shape=(16,), tp_dim=None)], tp=(0, 1), dp=(0, 1))


class _Killed(BaseException):
    """No ``except Exception`` sees it, as with a real kill."""


def _save(directory: Path, step: int, *, run: int, keep: int = 2) -> None:
    """``samples`` tells which save of a step a checkpoint is from."""
    state = TrainState(step=step, samples=run, optimizer={})
    save_checkpoint(directory, PIECES, state=state, config={}, groups=GROUPS, keep=keep)


def _samples(folder: Path) -> int:
    return read_index(folder).state.samples


def _kill_before_change(patch: pytest.MonkeyPatch, number: int) -> None:
    """End the process, so to speak, before change ``number`` of the folder of checkpoints."""
    left = [number]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                raise _Killed
            left[0] -= 1
            return real(*args, **kwargs)

        return change

    for owner, name in [
        (Path, "rename"),
        (Path, "replace"),
        (shutil, "rmtree"),
        (publish_module, "_write_text"),
        (publish_module, "flush_folder"),
    ]:
        patch.setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.parametrize(
    ("before", "step"),
    [((), 1), ((1, 2), 3), ((10, 20, 30, 15), 20), ((10, 20, 30, 15), 18), ((1, 2), 2)],
    ids=["first", "in order", "over an abandoned one", "before abandoned ones", "once more"],
)
def test_killed_before_any_change_the_newest_complete_checkpoint_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: tuple[int, ...], step: int
) -> None:
    came_through, number = False, 0
    while not came_through:
        directory = tmp_path / str(number)
        for run, earlier in enumerate(before):
            _save(directory, earlier, run=run)
        with monkeypatch.context() as patch:
            _kill_before_change(patch, number)
            try:
                _save(directory, step, run=100)
                came_through = True
            except _Killed:
                pass
        final = directory / f"step_{step:08d}"
        is_there = final.exists() and _samples(final) == 100
        found = find_checkpoint("auto", directory, groups=GROUPS)
        if is_there:
            assert found.path == final, f"killed before change {number}"
        elif before:
            assert found.path is not None
            assert _samples(found.path) == len(before) - 1, f"killed before change {number}"
        else:
            assert found.path is None
        assert found.skipped == ()
        _save(directory, step + 1, run=101)
        newest = find_checkpoint("auto", directory, groups=GROUPS).path
        assert newest is not None
        assert _samples(newest) == 101
        number += 1
    assert number > 5


def test_killed_twice_in_a_row_the_newest_complete_checkpoint_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came_through, number = False, 0
    while not came_through:
        directory = tmp_path / str(number)
        _save(directory, 1, run=0)
        _save(directory, 2, run=1)
        # As after a kill between the rename of the folder and that of `latest`.
        (directory / "latest.partial").write_text("step_00000002\n")
        (directory / "latest").write_text("step_00000001\n")
        with monkeypatch.context() as patch:
            _kill_before_change(patch, number)
            try:
                _save(directory, 3, run=2)
                came_through = True
            except _Killed:
                pass
        found = find_checkpoint("auto", directory, groups=GROUPS).path
        assert found is not None
        is_there = (directory / "step_00000003").exists()
        assert _samples(found) == (2 if is_there else 1), f"killed before change {number}"
        number += 1
    assert number > 5


@pytest.mark.parametrize("name", [".", "..", "notes", "step_1", ""])
def test_an_unfinished_latest_that_names_no_checkpoint_does_not_replace_the_finished_one(
    tmp_path: Path, name: str
) -> None:
    _save(tmp_path, 1, run=0)
    (tmp_path / "notes").mkdir()
    (tmp_path / "step_1").mkdir()
    (tmp_path / "latest.partial").write_text(name + "\n")
    publish_module.prepare(tmp_path / "step_00000002.partial", num_bytes=0)
    assert (tmp_path / "latest").read_text() == "step_00000001\n"


def test_an_old_checkpoint_that_was_moved_away_behind_a_link_is_only_unlinked(
    tmp_path: Path,
) -> None:
    directory, archive = tmp_path / "checkpoints", tmp_path / "archive"
    _save(directory, 1, run=0, keep=1)
    archive.mkdir()
    moved = (directory / "step_00000001").rename(archive / "step_00000001")
    (directory / "step_00000001").symlink_to(moved)
    for step in (2, 3):
        _save(directory, step, run=0, keep=1)
    assert sorted(path.name for path in directory.iterdir()) == ["latest", "step_00000003"]
    assert _samples(moved) == 0
