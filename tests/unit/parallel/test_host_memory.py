"""Who may share memory, how members agree on it, and the communicator in threads of one process."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from megacore._core import HostComm, HostDtype, HostReduction
from megacore.parallel.host import shared_memory
from megacore.parallel.host.shared_memory import (
    HostCommunicator,
    HostConnector,
    HostPath,
    Place,
    meminfo,
    refusal,
)

HERE = Place(host="a", boot="1", pids=7)


def with_threads(size: int, member: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, range(size)))


def connect_all(size: int, **settings: Any) -> list[HostPath]:
    store = HashStore()
    ranks = list(range(5, 5 + size))
    settings = {"timeout_s": 20.0, "slot_bytes": 4096, **settings}

    def member(position: int) -> HostPath:
        connector = HostConnector(store, prefix="test", **settings)
        return connector.connect("tp", ranks, position)

    return with_threads(size, member)


def my_segments() -> list[str]:
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [link for link in links if "memfd:megacore" in link]


def test_equal_places_may_share() -> None:
    assert refusal({0: HERE, 1: HERE}, segment_bytes=1) == ""


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (Place(host="b", boot="2", pids=7), "its ranks are on 2 hosts (a, b)"),
        (
            Place(host="a", boot="1", pids=8),
            "ranks 3 and 4 on a are in different containers",
        ),
        (
            Place(host="a", problem="a lacks /proc"),
            "rank 4 cannot share memory: a lacks /proc",
        ),
    ],
)
def test_other_places_may_not_share(other: Place, reason: str) -> None:
    assert reason in refusal({3: HERE, 4: other}, segment_bytes=1)


def test_a_segment_may_take_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "meminfo", lambda: {"MemAvailable": 64 << 20})
    assert refusal({0: HERE, 1: HERE}, segment_bytes=32 << 20) == ""
    assert refusal({0: HERE, 1: HERE}, segment_bytes=(32 << 20) + 1) == (
        "the host has 64.0 MiB of memory available, and the group's 32.0 MiB would take more "
        "than half"
    )


def test_this_process_knows_its_place() -> None:
    mine = Place.mine()
    assert mine == Place.mine()
    assert mine.problem == ""


def test_memory_of_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert 0 < meminfo()["MemAvailable"] <= meminfo()["MemTotal"]
    monkeypatch.setattr(shared_memory, "MEMINFO", tmp_path / "none")
    assert meminfo() == {}


def test_members_connect_and_leave_no_file_open() -> None:
    paths = connect_all(3)
    assert my_segments() == []
    communicators = [path.communicator for path in paths]
    assert all(path.note == "" for path in paths)

    def member(position: int) -> list[float]:
        communicator = communicators[position]
        assert communicator is not None
        tensor = torch.tensor([1.0 + position, 0.5])
        communicator.all_reduce_(tensor, op="sum")
        return tensor.tolist()

    assert with_threads(3, member) == [[6.0, 1.5]] * 3


def test_slots_have_room_for_all_members() -> None:
    for path in connect_all(4, slot_bytes=1):
        assert path.communicator is not None
        assert path.communicator.bytes_per_member == 2 * 4 * 64


def test_a_member_that_cannot_open_makes_all_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    class LastIsOutOfLuck(HostComm):
        def __init__(self, **settings: Any) -> None:
            if settings["position"] == 2:
                raise RuntimeError("cannot open a shared-memory segment")
            super().__init__(**settings)

    monkeypatch.setattr(shared_memory, "HostComm", LastIsOutOfLuck)
    for path in connect_all(3):
        assert path.communicator is None
        assert path.note == "rank 7 cannot open a shared-memory segment"
    assert my_segments() == []


def test_memory_that_cannot_be_reserved_makes_all_refuse() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # Python ignores its signal
    try:
        paths = connect_all(2, slot_bytes=1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for path in paths:
        assert path.communicator is None
        assert path.note.startswith("rank 5 cannot reserve a shared-memory segment of ")
        assert path.note.endswith("File too large")
    assert my_segments() == []


def test_a_member_that_never_comes_leaves_no_file_open() -> None:
    connector = HostConnector(HashStore(), prefix="test", timeout_s=0.2, slot_bytes=4096)
    with pytest.raises(RuntimeError, match=r"rank 9 \(position 1\) did not join ranks 8, 9"):
        connector.connect("tp", [8, 9], 0)
    assert my_segments() == []
    # The second one says where it runs, and dies before it opens the segment.
    store = HashStore()
    connectors = [
        HostConnector(store, prefix="test", timeout_s=0.2, slot_bytes=4096) for _ in range(2)
    ]
    for position in (1, 0):
        with pytest.raises(RuntimeError, match=r"within 0.2 s"):
            connectors[position].connect("tp", [0, 1], position)
    assert my_segments() == []


def test_waiting_for_a_member_may_be_given_up() -> None:
    def give_up() -> None:
        raise ValueError("it will never come")

    connector = HostConnector(
        HashStore(), prefix="test", timeout_s=60.0, slot_bytes=4096, while_waiting=give_up
    )
    with pytest.raises(ValueError, match="it will never come"):
        connector.connect("tp", [0, 1], 1)


def test_native_mistakes_become_python_errors() -> None:
    settings = {"position": 0, "ranks": [0], "slot_bytes": 64, "timeout_s": 1.0}
    with pytest.raises(
        RuntimeError, match=r"open the shared-memory segment /proc/\d+/fd/-2 of .* No such file"
    ):
        HostComm(segment=(os.getpid(), -2), **settings)
    with pytest.raises(ValueError, match=r"slot_bytes must be a multiple of 64, .*got 65"):
        HostComm(segment=None, **{**settings, "slot_bytes": 65})
    comm = HostComm(segment=None, **settings)
    comm.close_file()
    assert (comm.position, comm.size, comm.slot_bytes) == (0, 1, 64)
    with pytest.raises(ValueError, match="avg needs a floating point type, not int32"):
        comm.all_reduce(data=0, numel=0, dtype=HostDtype.INT32, op=HostReduction.AVG)
    with pytest.raises(ValueError, match="reduction of float64 cannot be written as float32"):
        comm.reduce_scatter(
            output=0,
            output_dtype=HostDtype.FLOAT32,
            input=0,
            dtype=HostDtype.FLOAT64,
            numel=0,
            op=HostReduction.SUM,
        )
    assert my_segments() == []


def test_inference_tensors_work() -> None:
    comm = HostComm(segment=None, position=0, ranks=[0], slot_bytes=64, timeout_s=1.0)
    communicator = HostCommunicator(comm)
    with torch.inference_mode():
        tensor = torch.arange(100.0)
        communicator.all_reduce_(tensor, op="avg")
        communicator.broadcast_(tensor, source_position=0)
    communicator.barrier()
    assert torch.equal(tensor, torch.arange(100.0))
