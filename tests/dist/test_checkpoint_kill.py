"""Killed at random moments of a save, a run always has a loadable checkpoint and loses none."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megacore.parallel.param_info import ParamInfo
from megacore.parallel.process_groups import ProcessGroups
from megacore.parallel.topology import Topology
from megatrain.checkpoint import (
    CheckpointSaver,
    TrainState,
    find_checkpoint,
    load_checkpoint,
    load_full_weights,
)
from tests.support.checkpoints import make_pieces

pytestmark = pytest.mark.dist

NUM_KILLS = 50
RANKS = 2
INFOS = [
    ParamInfo(name="embedding", full_shape=(64, 32), tp_dim=0),
    ParamInfo(name="layers.0.out", full_shape=(33, 32), tp_dim=None),
]


def _save_for_ever(rank: int, store: Path, directory: Path, in_background: bool, acks: Any) -> None:
    """Go on from the newest checkpoint and save step after step; ``acks`` says what is safe."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    groups = ProcessGroups.create(Topology(world_size=RANKS, tp=RANKS), host_memory=False)
    pieces = make_pieces(INFOS, tp=(rank, RANKS), dp=(0, 1))
    saver = CheckpointSaver(
        directory,
        lambda: pieces,
        groups=groups,
        config={},
        keep=1 + in_background,
        in_background=in_background,
    )
    first = 1
    found = find_checkpoint("auto", directory, groups=groups)
    if found.path is not None:
        state = load_checkpoint(found.path, pieces, groups=groups)
        assert all((t == state.step).all() for piece in pieces for t in piece.tensors.values())
        first = state.step + 1
    for step in itertools.count(first):
        for piece in pieces:
            for tensor in piece.tensors.values():
                tensor.fill_(step)
        saver.save(TrainState(step=step, samples=8 * step, optimizer={"step_count": step}))
        acks[rank] = step - in_background  # in the background, the former one is done


def _child(body: Callable[..., None], *args: Any) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a survivor complains of its lost peer
    with contextlib.suppress(BaseException):
        body(*args)
    os._exit(1)


def _kill_once(rng: random.Random, store: Path, directory: Path, in_background: bool) -> int:
    """Start the ranks, let them save, kill some and then all; returns the newest safe step."""
    context = multiprocessing.get_context("fork")
    acks = context.RawArray("q", RANKS)
    ranks = [
        context.Process(
            target=_child, args=(_save_for_ever, rank, store, directory, in_background, acks)
        )
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 120
    while min(acks) < 1:
        assert time.monotonic() < deadline, "the ranks did not save anything"
        assert all(process.is_alive() for process in ranks), "a rank ended by itself"
        time.sleep(0.001)
    time.sleep(rng.uniform(0.0, 0.1))
    victims = rng.choice([[0], [1], [0, 1]])
    for victim in victims:
        os.kill(ranks[victim].pid or 0, signal.SIGKILL)
    time.sleep(rng.choice([0.0, 0.02]))  # the survivor may go on for a while
    for process in ranks:
        process.kill()
        process.join()
    return max(acks)


@pytest.mark.parametrize(
    "in_background",
    [
        pytest.param(False, id="in the step"),
        pytest.param(True, id="in the background", marks=pytest.mark.campaign),
    ],
)
def test_a_kill_at_any_moment_leaves_a_loadable_checkpoint_and_loses_none(
    tmp_path: Path, in_background: bool
) -> None:
    rng = random.Random(20 + in_background)
    directory = tmp_path / "checkpoints"
    leftovers = 0
    for number in range(NUM_KILLS // 2):
        safe = _kill_once(rng, tmp_path / f"store_{number}", directory, in_background)
        leftovers += any(directory.glob("*.partial"))
        found = find_checkpoint("auto", directory, groups=ProcessGroups.single())
        assert found.path is not None
        assert found.skipped == (), "a checkpoint under its name is never damaged"
        pieces = make_pieces(INFOS, tp=(0, 1), dp=(0, 1), filled=False)
        state = load_checkpoint(found.path, pieces, groups=ProcessGroups.single())
        assert state.step >= safe, "a checkpoint that was reported safe is gone"
        assert state.samples == 8 * state.step
        _, weights = load_full_weights(directory)  # what `latest` names
        assert weights.keys() == {info.name for info in INFOS}
        assert all((t == state.step).all() for piece in pieces for t in piece.tensors.values())
    assert leftovers > 0, "no kill came while files were being written"
