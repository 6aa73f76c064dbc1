"""The launcher with NCCL: one spawned rank per GPU of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.support.jobs import Ended, assert_gone, pids_in, start_command

pytestmark = pytest.mark.gpu

WORKER = Path(__file__).parents[1] / "support" / "launch_worker.py"


def run(behaviour: str, folder: Path, ranks: int) -> Ended:
    arguments = [sys.executable, str(WORKER), behaviour, str(ranks), str(folder), "nccl"]
    return start_command(arguments, folder).finish(timeout_s=120)


def test_every_rank_has_a_gpu_of_its_own(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    ended = run("ok", tmp_path, count)
    assert (ended.code, ended.complaints()) == (0, [])
    assert ended.out.count(f"sum {count * (count + 1) // 2}") == count
    assert_gone(pids_in(tmp_path))


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    ended = run("ok", tmp_path, count + 1)
    assert ended.code == 2
    assert f"need {count + 1} GPUs, but this machine has {count}" in ended.err


def test_killed_rank_is_named_while_the_others_wait_in_nccl(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: a rank that waits for another one")
    ended = run("killed", tmp_path, 2)
    assert ended.code == 1
    [complaint] = ended.complaints()
    assert f"rank 1 (pid {pids_in(tmp_path)[1]} on host " in complaint
    assert_gone(pids_in(tmp_path))
