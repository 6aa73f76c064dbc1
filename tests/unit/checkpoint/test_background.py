"""Saving behind the step: what is copied, how many at a time, and how failures come to light."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.errors import CheckpointError
from megacore.optim import ParamPiece
from megacore.parallel.param_info import ParamInfo
from megacore.parallel.process_groups import Group, ProcessGroups
from megatrain.checkpoint import (
    CheckpointSaver,
    TrainState,
    choose_background,
    find_checkpoint,
    load_checkpoint,
)
from megatrain.checkpoint import save as save_module
from tests.support.checkpoints import ThreadWorld, make_pieces

GROUPS = ProcessGroups.single()
WEIGHT = ParamInfo(name="layers.0.w", full_shape=(16, 16), tp_dim=0)


class Gate:
    """Holds writers up until it is opened; counts how many write at once."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        self.error: Exception | None = None

    def pass_through(self) -> None:
        self.reached.set()
        assert self.open.wait(timeout=60)
        if self.error is not None:
            raise self.error


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()

    write = save_module._write_mine

    def gated(*args: Any) -> Any:
        gate.pass_through()
        return write(*args)

    monkeypatch.setattr(save_module, "_write_mine", gated)
    yield gate
    gate.open.set()


@pytest.fixture
def pieces() -> list[ParamPiece]:
    return make_pieces([WEIGHT], tp=(0, 1), dp=(0, 1))


def _saver(directory: Path, pieces: list[ParamPiece], **options: Any) -> CheckpointSaver:
    return CheckpointSaver(
        directory, lambda: pieces, groups=GROUPS, config={}, in_background=True, **options
    )


def _state(step: int) -> TrainState:
    return TrainState(step=step, samples=step, optimizer={})


def _set(pieces: list[ParamPiece], value: float) -> None:
    for piece in pieces:
        for tensor in piece.tensors.values():
            tensor.fill_(value)


def _saved_value(path: Path) -> float:
    empty = make_pieces([WEIGHT], tp=(0, 1), dp=(0, 1), filled=False)
    load_checkpoint(path, empty, groups=GROUPS)
    [value] = {number for tensor in empty[0].tensors.values() for number in tensor.tolist()}
    return float(value)


def _poll_until_done(saver: CheckpointSaver) -> None:
    while saver._task is not None:
        saver.poll()


def test_the_state_of_the_step_is_saved_though_training_goes_on(
    tmp_path: Path, pieces: list[ParamPiece], gate: Gate
) -> None:
    saver = _saver(tmp_path, pieces)
    _set(pieces, 1.0)
    assert saver.save(_state(1)) is None
    assert gate.reached.wait(timeout=60)
    _set(pieces, 2.0)
    assert saver.poll() is None  # it is still being written
    assert find_checkpoint("auto", tmp_path, groups=GROUPS).path is None
    gate.open.set()
    assert saver.finish() is None
    assert _saved_value(tmp_path / "step_00000001") == 1.0


def test_the_next_save_waits_for_the_former_and_uses_its_memory(
    tmp_path: Path, pieces: list[ParamPiece], gate: Gate
) -> None:
    saver = _saver(tmp_path, pieces)
    _set(pieces, 1.0)
    saver.save(_state(1))
    assert saver._staging is not None
    buffers = {index: tensor.data_ptr() for index, tensor in saver._staging._buffers.items()}
    _set(pieces, 2.0)
    second = threading.Thread(target=lambda: saver.save(_state(2)))
    second.start()
    second.join(timeout=0.2)
    assert second.is_alive()
    assert not (tmp_path / "step_00000002.partial").exists()
    gate.open.set()
    second.join(timeout=60)
    saver.finish()
    assert _saved_value(tmp_path / "step_00000001") == 1.0
    assert _saved_value(tmp_path / "step_00000002") == 2.0
    again = {index: tensor.data_ptr() for index, tensor in saver._staging._buffers.items()}
    assert again == buffers


def test_a_failure_comes_to_light_at_the_next_step_with_its_cause(
    tmp_path: Path, pieces: list[ParamPiece], gate: Gate
) -> None:
    gate.open.set()
    saver = _saver(tmp_path, pieces)
    saver.save(_state(1))
    saver.finish()
    gate.error = OSError(28, "No space left on device", "disk")
    saver.save(_state(2))
    with pytest.raises(CheckpointError, match="No space left on device"):
        _poll_until_done(saver)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001"]
    gate.error = None
    saver.save(_state(3))
    saver.finish()
    assert find_checkpoint("auto", tmp_path, groups=GROUPS).path == tmp_path / "step_00000003"


@pytest.mark.parametrize("in_background", [False, True])
def test_failures_can_be_tolerated(
    tmp_path: Path, pieces: list[ParamPiece], gate: Gate, in_background: bool
) -> None:
    gate.open.set()
    gate.error = OSError(28, "No space left on device", "disk")
    saver = CheckpointSaver(
        tmp_path,
        lambda: pieces,
        groups=GROUPS,
        config={},
        tolerant=True,
        in_background=in_background,
    )
    why = saver.save(_state(1)) or saver.finish()
    assert why is not None
    assert "No space left on device" in why
    gate.error = None
    assert (saver.save(_state(2)), saver.finish()) == (None, None)
    assert find_checkpoint("auto", tmp_path, groups=GROUPS).path == tmp_path / "step_00000002"


def test_a_bug_in_the_background_is_never_tolerated(
    tmp_path: Path, pieces: list[ParamPiece], gate: Gate
) -> None:
    gate.open.set()
    gate.error = KeyError("bug")
    saver = _saver(tmp_path, pieces, tolerant=True)
    saver.save(_state(1))
    with pytest.raises(KeyError, match="bug"):
        saver.finish()


def test_an_abandoned_save_leaves_the_older_checkpoint(
    tmp_path: Path, pieces: list[ParamPiece], gate: Gate
) -> None:
    gate.open.set()
    saver = _saver(tmp_path, pieces)
    saver.save(_state(1))
    saver.finish()
    gate.open.clear()
    saver.save(_state(2))
    saver.abandon()
    assert (tmp_path / "step_00000002.partial").is_dir()
    assert find_checkpoint("auto", tmp_path, groups=GROUPS).path == tmp_path / "step_00000001"


def test_saving_is_planned_once(
    tmp_path: Path, pieces: list[ParamPiece], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []
    real = save_module.merge_boxes

    def counted(*args: Any) -> Any:
        plans.append(args)
        return real(*args)

    monkeypatch.setattr(save_module, "merge_boxes", counted)
    saver = _saver(tmp_path, pieces)
    for step in (1, 2, 3):
        saver.save(_state(step))
    saver.finish()
    assert len(plans) == 1


def test_other_ranges_than_planned_are_our_own_bug(
    tmp_path: Path, pieces: list[ParamPiece]
) -> None:
    saver = _saver(tmp_path, pieces)
    saver.save(_state(1))
    pieces[:] = make_pieces([WEIGHT], tp=(0, 1), dp=(0, 2))
    with pytest.raises(RuntimeError, match="holds other ranges than when saving was planned"):
        saver.save(_state(2))


def _decide(
    monkeypatch: pytest.MonkeyPatch, numels: Sequence[int], *, ranks_per_host: int = 1
) -> tuple[bool, tuple[str, ...]]:
    """Return the choice of ranks with so many float32 values to write, which all make."""

    def choose(groups: ProcessGroups) -> tuple[bool, tuple[str, ...]]:
        numel = numels[groups.rank]
        info = ParamInfo(name=f"w{groups.rank}", full_shape=(numel,), tp_dim=None)
        values = {"main_param": torch.empty(numel, device="meta")}
        piece = ParamPiece(info=info, start=0, end=numel, tensors=values, holders=Group.solo())
        return choose_background([piece], groups, ranks_per_host=ranks_per_host)

    world = ThreadWorld(monkeypatch, tp=1, dp=len(numels))
    [found] = set(world.run(choose))
    return found


def test_saves_of_much_data_run_in_the_background_where_the_hosts_have_memory_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gib = (1 << 30) // 4
    memory = {"MemAvailable": 10 << 30}
    monkeypatch.setattr("megatrain.checkpoint.background.meminfo", lambda: memory)
    assert _decide(monkeypatch, [gib, gib]) == (False, ())
    assert _decide(monkeypatch, [gib, gib + 1]) == (True, ())
    assert _decide(monkeypatch, [100, 5 * gib]) == (True, ())
    large, notes = _decide(monkeypatch, [100, 3 * gib], ranks_per_host=2)
    assert (large, len(notes)) == (False, 1)
    assert notes[0].startswith(
        "checkpoints are written while training waits: copies of 6.4 GB would take more than half "
        "of the 10.7 GB of memory available on the host of rank 1; checkpoint.async = true"
    )
