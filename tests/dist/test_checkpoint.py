"""Checkpoints written and read by real gloo ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megacore.errors import CheckpointError
from megacore.parallel.collectives import all_gather_objects, all_reduce_
from megacore.parallel.group_timeout import longer_timeout
from megacore.parallel.param_info import ParamInfo
from megacore.parallel.process_groups import ProcessGroups
from megacore.parallel.topology import Topology
from megatrain.checkpoint import (
    CheckpointSaver,
    TrainState,
    find_checkpoint,
    load_checkpoint,
    load_full_weights,
    save_checkpoint,
)
from megatrain.checkpoint import save as save_module
from tests.support.checkpoints import assert_equal_pieces, full_values, make_pieces
from tests.support.distributed import RankFailed, run_ranks

pytestmark = pytest.mark.dist

STATE = TrainState(step=40, samples=1280, optimizer={"step_count": 39, "num_skipped": 1})
INFOS = [
    ParamInfo(name="embedding", full_shape=(256, 32), tp_dim=0, shared="embedding"),
    ParamInfo(name="layers.0.attention.qkv", full_shape=(3, 32, 32), tp_dim=1),
    ParamInfo(name="layers.0.attention.out", full_shape=(32, 32), tp_dim=1),
    ParamInfo(name="layers.0.norm", full_shape=(33,), tp_dim=None),
]


def _groups(world_size: int, tp: int) -> ProcessGroups:
    return ProcessGroups.create(Topology(world_size=world_size, tp=tp))


def _pieces(groups: ProcessGroups, infos: Sequence[ParamInfo] = INFOS, *, filled: bool = True):
    return make_pieces(
        infos,
        tp=(groups.tp.position, groups.tp.size),
        dp=(groups.dp.position, groups.dp.size),
        filled=filled,
    )


def _save(rank: int, world_size: int, tp: int, directory: Path, step: int = 40) -> Path:
    groups = _groups(world_size, tp)
    assert groups.rank == rank
    state = replace(STATE, step=step)
    return save_checkpoint(
        directory, _pieces(groups), state=state, config={"model": {}}, groups=groups
    )


def _load(rank: int, world_size: int, tp: int, path: Path) -> None:
    groups = _groups(world_size, tp)
    assert groups.rank == rank
    found = find_checkpoint("auto", path.parent, groups=groups)
    assert found.path == path
    pieces = _pieces(groups, filled=False)
    assert load_checkpoint(path, pieces, groups=groups) == STATE
    assert_equal_pieces(pieces, _pieces(groups))


def test_four_ranks_save_and_one_two_or_four_load(tmp_path: Path) -> None:
    paths = run_ranks(4, _save, 4, 2, tmp_path)
    assert paths == [tmp_path / "step_00000040"] * 4
    for world_size, tp in ((4, 2), (4, 4), (4, 1), (2, 1), (2, 2), (1, 1)):
        run_ranks(world_size, _load, world_size, tp, paths[0])
    _, weights = load_full_weights(tmp_path)
    for info in INFOS:
        assert (weights[info.name] == full_values(info, "main_param")).all()


def _load_a_wrong_model(rank: int, path: Path) -> str:
    groups = _groups(2, 2)
    # Only rank 1 sees the misfit; both must raise it, or rank 0 would wait for ever.
    infos = INFOS if rank == 0 else [*INFOS, ParamInfo(name="new", full_shape=(4,), tp_dim=None)]
    pieces = _pieces(groups, infos, filled=False)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, pieces, groups=groups)
    return str(caught.value)


def test_a_misfit_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    path = run_ranks(1, _save, 1, 1, tmp_path)[0]
    messages = run_ranks(2, _load_a_wrong_model, path, timeout_s=20)
    assert messages[0] == messages[1]
    assert messages[0].startswith("rank 1: checkpoint ")
    assert "has no parameter new" in messages[0]


def _save_behind_steps(rank: int, directory: Path) -> bool:
    """Rank 1 writes slowly while both compute sums over the world; nothing mixes."""
    groups = _groups(2, 1)
    real_write = save_module._write_mine

    def write_slowly(*args, **kwargs):
        if rank == 1:
            time.sleep(0.5)
        return real_write(*args, **kwargs)

    save_module._write_mine = write_slowly  # this process ends here
    pieces = _pieces(groups)
    saver = CheckpointSaver(directory, lambda: pieces, groups=groups, config={}, in_background=True)
    saver.save(STATE)
    for piece in pieces:
        for tensor in piece.tensors.values():
            tensor.zero_()  # as the next steps do
    for step in range(200):
        values = torch.full((3,), float(step * (rank + 1)))
        all_reduce_(values, groups.world)
        assert values.tolist() == [3.0 * step] * 3
        saver.poll()
    saver.finish()
    return (directory / "step_00000040").exists()


def test_saving_in_the_background_meets_no_collective_of_the_step(tmp_path: Path) -> None:
    assert run_ranks(2, _save_behind_steps, tmp_path) == [True, True]
    run_ranks(1, _load, 1, 1, tmp_path / "step_00000040")


def _save_longer_than_collectives_may_take(rank: int, directory: Path) -> str:
    groups = _groups(2, 1)
    with longer_timeout(groups.world, timedelta(0)):
        pass  # changes nothing
    for device in groups.world.handle._device_types:
        groups.world.handle._get_backend(device)._set_default_timeout(timedelta(seconds=1))
    real_write = save_module._write_mine

    def write_slowly(*args, **kwargs):
        if rank == 1:
            time.sleep(2.5)
        return real_write(*args, **kwargs)

    save_module._write_mine = write_slowly  # this process ends here
    save_checkpoint(directory, _pieces(groups), state=STATE, config={}, groups=groups)
    if rank == 1:
        time.sleep(2.5)
    try:
        all_gather_objects(rank, groups.world)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_save_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    messages = run_ranks(2, _save_longer_than_collectives_may_take, tmp_path)
    assert "Timed out" in messages[0], "the limit of other collectives is as before"
    run_ranks(1, _load, 1, 1, tmp_path / "step_00000040")


def _fail_in_the_background(rank: int, directory: Path) -> tuple[str, list[str]]:
    groups = _groups(2, 1)
    if rank == 1:

        def write_nothing(*_: object) -> None:
            raise OSError(28, "No space left on device", "disk")

        save_module._write_mine = write_nothing  # this process ends here
    saver = CheckpointSaver(
        directory, lambda: _pieces(groups), groups=groups, config={}, in_background=True
    )
    saver.save(STATE)
    with pytest.raises(CheckpointError) as caught:
        saver.finish()
    return str(caught.value), sorted(path.name for path in directory.iterdir())


def test_a_failure_in_the_background_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    results = run_ranks(2, _fail_in_the_background, tmp_path)
    assert {message for message, _ in results} == {"rank 1: No space left on device: disk"}
    assert list(tmp_path.iterdir()) == []


def _die_while_saving(rank: int, directory: Path) -> None:
    groups = _groups(2, 1)
    real_write = save_module._write_mine

    def write_and_die(*args, **kwargs):
        written = real_write(*args, **kwargs)
        if rank == 1:
            time.sleep(0.2)  # rank 0 has written its file by now, too
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    save_module._write_mine = write_and_die  # this process ends here
    state = TrainState(step=80, samples=1, optimizer={})
    save_checkpoint(directory, _pieces(groups), state=state, config={}, groups=groups)


def test_a_rank_killed_while_saving_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    path = run_ranks(2, _save, 2, 1, tmp_path)[0]
    with pytest.raises(RankFailed):
        run_ranks(2, _die_while_saving, tmp_path)
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert [name for name in names if not name.endswith(".partial")] == ["latest", path.name]
    run_ranks(1, _load, 1, 1, path)
    # The next attempt at that step starts from scratch.
    again = run_ranks(2, _save, 2, 1, tmp_path, 80)[0]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", path.name, again.name]
