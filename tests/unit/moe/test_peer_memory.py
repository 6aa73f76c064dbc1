"""Memory that GPUs of a group write to, with an allocator of the host."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megacore._core import PEER_SLOTS
from megacore.moe.dispatchers import device_peers
from megacore.moe.dispatchers.device_peers import DevicePeers
from megacore.moe.dispatchers.peer_memory import CopyMap
from megacore.parallel.process_groups import Group


class OnHost(DevicePeers):
    """One member whose memory is that of the host."""

    def _allocate(self, num_bytes: int) -> tuple[Tensor, Tensor, object]:
        return torch.zeros(1, dtype=torch.int64), torch.zeros(num_bytes, dtype=torch.uint8), None


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> OnHost:
    kernels = SimpleNamespace(PEER_STATE_NUMEL=4)
    monkeypatch.setattr(device_peers, "cuda_kernels", lambda: kernels)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return OnHost(Group("ep", (0,), 0, None), torch.device("cpu"), timeout_s=1.0)


class Queue:
    """A stream that notes what is queued in it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Queue) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Done) -> None:
        self.log.append(f"{self.name} waits for {event.after}")


class Done:
    """Event with the last work queued before it."""

    after = ""

    def record(self, queue: Queue) -> None:
        self.after = queue.log[-1]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Log of the work queued from now on, with its stream, in order."""
    log: list[str] = []
    main, side = Queue("main", log), Queue("side", log)
    running = [main]

    @contextmanager
    def on(queue: Queue) -> Iterator[None]:
        running.append(queue)
        yield
        running.pop()

    def note(name: str) -> Callable[..., None]:
        return lambda *_: log.append(f"{name} on {running[-1].name}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: side)
    monkeypatch.setattr(torch.cuda, "Event", Done)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: running[-1])
    for name in ("start_push", "finish_push", "reserve_pull", "start_pull", "finish_pull"):
        monkeypatch.setattr(device_peers.peer_exchange, name, note(name))
    return log


COPIES = CopyMap(
    rows=torch.zeros(3, 1, dtype=torch.int64),
    num_choices=1,
    capacity=8,
    num_arrived=torch.tensor(0),
)


def test_a_push_has_a_stream_of_its_own_until_it_is_finished(peers: OnHost, log: list[str]) -> None:
    x, probs = torch.zeros(3, 4), torch.zeros(3, 1)
    for _ in range(2):
        pushed = x.clone()
        held = weakref.ref(pushed)
        ticket = peers.start_push(pushed, probs, COPIES)
        del pushed
        gc.collect()
        assert held() is not None  # its memory is not used again before the push has read it
        peers.finish_push(ticket, torch.zeros(8, 4), None, COPIES)
        assert held() is None  # nor later, so a graph's pool has it for what follows
    expected = [
        "side waits for main",
        "start_push on side",
        "main waits for start_push on side",
        "finish_push on main",
    ]
    assert log == expected * 2
    log.clear()
    pushed = x.clone()
    held = weakref.ref(pushed)
    peers.start_push(pushed, probs, COPIES)
    del pushed
    peers.forget_exchanges()
    assert log == [*expected[:2], "main waits for side"]
    assert held() is None


def test_a_pull_sums_on_that_stream_too_and_keeps_what_it_reads_and_writes(
    peers: OnHost, log: list[str]
) -> None:
    rows, sums = torch.zeros(8, 4), torch.zeros(3, 4)
    held = [weakref.ref(rows), weakref.ref(sums)]
    pull = peers.reserve_pull(COPIES, rows)
    peers.start_pull(pull, rows, None, sums, None)
    del rows, sums
    gc.collect()
    assert None not in [tensor() for tensor in held]
    peers.finish_pull(pull)
    assert [tensor() for tensor in held] == [None, None]
    assert log == [
        "reserve_pull on main",  # a product that writes to the slot comes behind it
        "side waits for main",
        "start_pull on side",
        "finish_pull on side",
        "main waits for finish_pull on side",
    ]


def test_an_exchange_is_awaited_without_those_that_started_after_it(
    peers: OnHost, log: list[str]
) -> None:
    x, rows = torch.zeros(3, 4), torch.zeros(8, 4)
    push = peers.start_push(x, None, COPIES)
    pull = peers.reserve_pull(COPIES, rows)
    peers.start_pull(pull, rows, None, x, None)
    log.clear()
    peers.finish_push(push, rows, None, COPIES)
    assert log == ["main waits for start_push on side", "finish_push on main"]


def test_a_reserved_slot_is_the_place_for_rows_of_a_pull_in_this_members_memory(
    peers: OnHost, log: list[str]
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        like = torch.zeros(8, 4, dtype=dtype)
        first = peers.reserve_pull(COPIES, like)
        peers.start_pull(first, like, None, torch.zeros(3, 4), None)
        second = peers.reserve_pull(COPIES, like)
        own = peers._memories[-1].own
        begin, end = own.data_ptr(), own.data_ptr() + own.numel()
        for pull in (first, second):
            assert (pull.rows.shape, pull.rows.dtype) == ((8, 4), dtype)
            assert begin <= pull.rows.data_ptr() <= end - pull.rows.nbytes
            assert pull.holds(pull.rows)
            assert not pull.holds(pull.rows.clone())
            assert not pull.rows._is_view()
        assert abs(first.rows.data_ptr() - second.rows.data_ptr()) >= first.rows.nbytes
        peers.forget_exchanges()
    assert log


def test_a_slot_whose_pull_never_starts_is_free_for_the_next_exchange(
    peers: OnHost, log: list[str]
) -> None:
    rows = torch.zeros(8, 4)
    for _ in range(2 * PEER_SLOTS):
        peers.reserve_pull(COPIES, rows)
    assert log[1:].count("reserve_pull on main") == log.count("finish_pull on side")
    for _ in range(PEER_SLOTS):  # the first of these in the reserved slot
        peers.start_push(torch.zeros(3, 4), None, COPIES)
    with pytest.raises(RuntimeError, match="exchanges of rows are under way"):
        peers.reserve_pull(COPIES, rows)


def test_memory_that_no_graph_captured_is_freed_when_a_larger_one_replaces_it(
    peers: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = peers._reserve(2, 16, 64)
    large = peers._reserve(2, 32, 64)
    assert peers._memories == [large]
    assert small is not large
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert peers._reserve(2, 32, 64) is large
    larger = peers._reserve(2, 64, 64)
    assert peers._memories == [large, larger]


def test_memory_with_an_exchange_in_flight_is_kept(peers: OnHost) -> None:
    memory = peers._reserve(2, 16, 64)
    memory.slots.take()
    assert peers._reserve(4, 16, 64) is not memory
    assert memory in peers._memories
