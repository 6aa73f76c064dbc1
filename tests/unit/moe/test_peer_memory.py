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

from megacore.moe.dispatchers import symmetric_peers
from megacore.moe.dispatchers.peers import CopyMap
from megacore.moe.dispatchers.symmetric_peers import DevicePeers
from megacore.parallel.process_groups import Group


class OnHost(DevicePeers):
    """One member whose memory is that of the host."""

    def _allocate(self, num_bytes: int) -> tuple[Tensor, object]:
        return torch.zeros(1, dtype=torch.int64), num_bytes


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> OnHost:
    kernels = SimpleNamespace(PEER_STATE_NUMEL=4)
    monkeypatch.setattr(symmetric_peers, "cuda_kernels", lambda: kernels)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return OnHost(Group("ep", (0,), 0, None), torch.device("cpu"), timeout_s=1.0)


class Queue:
    """A stream that notes what is queued in it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Queue) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def test_a_push_has_a_stream_of_its_own_until_it_is_finished(
    peers: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: running[-1])
    for name in ("start_push", "finish_push"):
        monkeypatch.setattr(symmetric_peers.peer_exchange, name, note(name))
    x, probs = torch.zeros(3, 4), torch.zeros(3, 1)
    copies = CopyMap(
        rows=torch.zeros(3, 1, dtype=torch.int64),
        num_choices=1,
        capacity=8,
        num_arrived=torch.tensor(0),
    )
    for _ in range(2):
        pushed = x.clone()
        held = weakref.ref(pushed)
        ticket = peers.start_push(pushed, probs, copies)
        del pushed
        gc.collect()
        assert held() is not None  # its memory is not used again before the push has read it
        peers.finish_push(ticket, torch.zeros(8, 4), None, copies)
        assert held() is None  # nor later, so a graph's pool has it for what follows
    expected = [
        "side waits for main",
        "start_push on side",
        "main waits for side",
        "finish_push on main",
    ]
    assert log == expected * 2
    log.clear()
    pushed = x.clone()
    held = weakref.ref(pushed)
    peers.start_push(pushed, probs, copies)
    del pushed
    peers.forget_exchanges()
    assert log == [*expected[:2], "main waits for side"]
    assert held() is None


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
