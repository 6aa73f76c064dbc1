"""Memory that GPUs of a group write to, with an allocator of the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megacore.moe.dispatchers import symmetric_peers
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
