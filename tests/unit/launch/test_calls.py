"""The ring of calls: what is written is read, whatever happens around it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megacore.calls import records
from megacore.calls.records import (
    ANY,
    DONE,
    ENQUEUED,
    FAILED,
    NUM_RECORDS,
    STARTED,
    read_rings,
    remove_rings,
    ring_folder,
    save_rings,
    saved_folder,
)
from megacore.calls.ring import CallRing
from megatrain.cli import main
from megatrain.hang.diagnosis import diagnose
from tests.support.jobs import start_function


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[CallRing]:
    made = CallRing.create(tmp_path, rank=1, world_size=4, run="a")
    assert made is not None
    yield made
    remove_rings(tmp_path)


def test_calls_are_read_as_written(ring: CallRing, tmp_path: Path) -> None:
    group = ring.group("tp", [0, 1])
    with group.begin("all_reduce_", (2, 3), torch.bfloat16):
        [[record]] = [ring.records for ring in read_rings(tmp_path)]
        assert (record.state, record.number) == (STARTED, 1)
    with pytest.raises(ZeroDivisionError), group.renamed("etp").begin("barrier", (), ""):
        _ = 1 / 0
    late = group.messages(1, 0, 5).begin("send", (ANY, 7), torch.int64, ENQUEUED)
    [found] = read_rings(tmp_path)
    assert found.identity.pid == os.getpid()
    first, second, third = found.records
    assert str(first).startswith("all_reduce_ [2, 3] bfloat16 over tp, number 1 (")
    assert "test_calls.py:" in first.site
    assert (first.state, second.state, third.state) == (DONE, FAILED, ENQUEUED)
    assert (second.group, second.number, second.members) == ("etp", 2, (0, 1))
    assert (third.stream, third.shape) == (("tp 1->0 5", (1, 0)), (ANY, 7))
    late.move_to(DONE)
    assert read_rings(tmp_path)[0].records[-1].state == DONE


def test_the_last_calls_are_kept_and_all_are_counted(ring: CallRing, tmp_path: Path) -> None:
    rare, often = ring.group("world", range(4)), ring.group("tp", [0, 1])
    old = rare.begin("barrier", (), "")
    for _ in range(NUM_RECORDS + 5):
        with often.begin("all_reduce_", (1,), torch.float32):
            pass
    old.move_to(DONE)  # its record is gone
    [found] = read_rings(tmp_path)
    assert [record.number for record in found.records] == list(range(6, NUM_RECORDS + 6))
    assert all(record.state == DONE for record in found.records)
    assert found.counts == {("world", (0, 1, 2, 3)): 1, ("tp", (0, 1)): NUM_RECORDS + 5}


@given(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=12, unique=True))
def test_ranks_are_shortened_and_lengthened(ranks: list[int]) -> None:
    assert records._lengthened(records.shortened(ranks)) == tuple(ranks)
    regular = range(ranks[0], ranks[0] + 7000, 7)
    assert len(records.shortened(regular)) == 3
    assert records._lengthened(records.shortened(regular)) == tuple(regular)


def test_a_copy_keeps_the_first_state_and_the_newest_start_counts(
    ring: CallRing, tmp_path: Path
) -> None:
    group = ring.group("tp", [0, 1])
    call = group.begin("all_reduce_", (2,), torch.float32)
    save_rings(tmp_path)
    call.move_to(DONE)
    save_rings(tmp_path)
    [found] = read_rings(tmp_path)
    assert (found.is_copy, found.records[0].state) == (True, STARTED)
    newer = CallRing.create(tmp_path, rank=0, world_size=4, run="b")
    assert newer is not None
    [found] = read_rings(tmp_path)
    assert (found.run, found.identity.rank) == ("b", 0)
    remove_rings(tmp_path)
    assert not ring_folder(tmp_path).exists()


def test_damaged_rings_are_passed_over(ring: CallRing, tmp_path: Path) -> None:
    raw = bytearray(ring.path.read_bytes())
    for place in (0, 16, 20, 60):
        damaged = raw.copy()
        damaged[place] ^= 0x80
        ring.path.write_bytes(damaged)
        assert read_rings(tmp_path) == []
    ring.path.write_bytes(raw[:5000])
    assert read_rings(tmp_path) == []


def test_a_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    folder = ring_folder(tmp_path)
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    assert CallRing.create(tmp_path, rank=0, world_size=2, run="a") is None
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert CallRing.create(tmp_path, rank=0, world_size=2, run="a") is None
    folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def test_rings_of_dead_runs_are_swept_after_a_day(tmp_path: Path) -> None:
    def leave_rings() -> int:
        return 0 if CallRing.create(tmp_path / "dead", rank=0, world_size=2, run="a") else 1

    assert start_function(leave_rings, tmp_path).finish().code == 0
    left = ring_folder(tmp_path / "dead")
    assert CallRing.create(tmp_path / "new", rank=0, world_size=2, run="b") is not None
    assert left.exists()  # for why-hung
    os.utime(left, (0, 0))
    os.utime(ring_folder(tmp_path / "new"), (0, 0))
    assert CallRing.create(tmp_path / "new", rank=1, world_size=2, run="b") is not None
    assert not left.exists()
    assert len(read_rings(tmp_path / "new")) == 2  # its process, this one, is alive
    remove_rings(tmp_path / "new")


def test_ranks_that_do_not_wait_are_no_hang(ring: CallRing, tmp_path: Path) -> None:
    with ring.group("tp", [0, 1]).begin("all_reduce_", (2,), torch.float32):
        pass
    assert diagnose(read_rings(tmp_path)).findings == ()


def test_why_hung_without_calls_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why-hung", str(tmp_path)]) == 2
    assert "no calls of ranks were found" in capsys.readouterr().err


def test_a_rank_that_ends_inside_a_call_is_named(tmp_path: Path) -> None:
    def wait_for_ever(rank: int) -> int:
        ring = CallRing.create(tmp_path / "run", rank=rank, world_size=2, run="a")
        assert ring is not None
        ring.group("world", [0, 1]).begin("barrier", (), "")
        (tmp_path / str(rank)).touch()
        while True:
            signal.pause()

    jobs = [start_function(partial(wait_for_ever, rank), tmp_path) for rank in range(2)]
    while not all((tmp_path / str(rank)).exists() for rank in range(2)):
        time.sleep(0.01)
    assert diagnose(read_rings(tmp_path / "run")).findings == ()
    for number, cause in ((signal.SIGSTOP, "stopped"), (signal.SIGKILL, "ended")):
        os.kill(jobs[1].pid, number)
        time.sleep(0.2)
        [finding] = diagnose(read_rings(tmp_path / "run")).findings
        assert (finding.cause, finding.ranks) == (cause, (1,))
    os.kill(jobs[0].pid, signal.SIGKILL)
    for job in jobs:
        job.finish()
    remove_rings(tmp_path / "run")


def test_ranks_of_other_machines_are_blamed_last(ring: CallRing, tmp_path: Path) -> None:
    ring.group("world", range(4)).begin("barrier", (), "")
    text = str(diagnose(read_rings(tmp_path)))
    assert "the cause is with ranks 0, 2, 3, whose calls cannot be read here\n" in text
    assert text.endswith("the calls of 1 of 4 ranks could be read")


def copied_rings(folder: Path, num_ranks: int, *, late: int, failed: bool = False) -> None:
    """Full rings of ranks that wait for one of them, as they are copied after a failure.

    The call in which they wait may have failed, as after a timeout.
    """
    saved_folder(folder).mkdir(parents=True)
    for rank in range(num_ranks):
        ring = CallRing.create(folder, rank=rank, world_size=num_ranks, run="r")
        assert ring is not None
        tp = ring.group("tp", range(rank // 4 * 4, rank // 4 * 4 + 4))
        world = ring.group("world", range(num_ranks))
        for step in range(600):
            with tp.begin("all_reduce_", (4, 8), "float32"):
                pass
            is_last = step == 599
            if is_last and rank == late:
                break
            call = world.begin("all_reduce_", (4,), "float32")
            with contextlib.nullcontext() if is_last else call:
                pass
            if is_last and failed:
                call.move_to(FAILED)
        shutil.copyfile(ring.path, saved_folder(folder) / ring.path.name)
        ring.remove()


@pytest.mark.parametrize("failed", [False, True])
def test_copied_rings_are_compared_in_little_memory(tmp_path: Path, failed: bool) -> None:
    copied_rings(tmp_path, 40, late=13, failed=failed)
    tracemalloc.start()
    rings = read_rings(tmp_path)
    found = diagnose(rings)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most / 40 < 20_000 + 400_000 / 40  # one ring at a time has all its records
    assert [finding.ranks for finding in found.findings] == [(13,)]
    assert len(found.waits) == 39
    assert all(len(ring.records) == NUM_RECORDS for ring in rings)
    whole = [replace(ring, records=list(ring.records)) for ring in rings]
    assert str(diagnose(whole)) == str(found)
    assert diagnose(whole) == found


def test_copies_that_are_removed_meanwhile_have_no_records(tmp_path: Path) -> None:
    copied_rings(tmp_path, 4, late=1)
    rings = read_rings(tmp_path)
    shutil.rmtree(saved_folder(tmp_path))
    assert [list(ring.records) for ring in rings] == [[]] * 4
    assert diagnose(rings).findings == ()
