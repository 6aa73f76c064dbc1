"""Tensors that ranks of one host read directly: the bits of the other ways, and what goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacore.buffers import ParamGradBuffer
from megacore.parallel import ProcessGroups, Topology
from megacore.parallel.collectives import all_gather, reduce_scatter
from megacore.parallel.host.window import WindowTensor
from megacore.parallel.param_info import ParamInfo
from tests.support.distributed import RankFailed, run_ranks

pytestmark = pytest.mark.dist

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * numel + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def both_ways(rank: int, world_size: int) -> list[bool]:
    """Whether each collective on a window has the bits of the one on plain tensors over gloo."""
    topology = Topology(world_size=world_size)
    shared = ProcessGroups.create(topology).world
    gloo = ProcessGroups.create(topology, host_memory=False).world
    equal = []
    for dtype in DTYPES:
        for own in (1, 64, 1000):
            numel = own * world_size
            window = WindowTensor.zeros(2 * numel, dtype=dtype, group=shared, num_parts=2)
            assert window is not None
            mine = slice(rank * own, (rank + 1) * own)
            for op in ("sum", "avg", "sum"):
                window.data[numel:] = values(rank, numel, dtype)
                expected = torch.empty(own, dtype=dtype)
                reduce_scatter(expected, window.data[numel:].clone(), gloo, op=op)  # type: ignore[arg-type]
                window.start_reduce_scatter(1, numel, 2 * numel, op=op, name="r").wait()  # type: ignore[arg-type]
                equal.append(torch.equal(window.data[numel:][mine], expected))
                window.wait_until_free(1)
            window.data[:numel][mine] = values(rank, own, dtype)
            collected = torch.empty(numel, dtype=dtype)
            all_gather(collected, window.data[:numel][mine].clone(), gloo)
            window.start_all_gather(0, 0, numel, name="g").wait()
            equal.append(torch.equal(window.data[:numel], collected))
            window.wait_until_free(0)
    return equal


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_windows_have_the_bits_of_gloo(world_size: int) -> None:
    for equal in run_ranks(world_size, both_ways, world_size, timeout_s=120):
        assert all(equal)
        assert len(equal) == 4 * len(DTYPES) * 3


def one_buffer(rank: int, host_memory: bool) -> tuple[bool, list[float]]:
    groups = ProcessGroups.create(Topology(world_size=2), host_memory=host_memory)
    weight = torch.nn.Parameter(torch.ones(256))
    info = ParamInfo(name="w", full_shape=(256,), tp_dim=None)
    buffer = ParamGradBuffer([(info, weight)], dp_group=groups.dp_cp)
    for _ in range(2):  # a first gradient replaces what is left of the step before
        buffer.zero_grads()
        for _ in range(2):
            (weight * (1.0 + rank)).sum().backward()
        buffer.reduce_scatter_grads()
    return buffer.starts_are_free, buffer.grad_data[128 * rank : 128 * rank + 2].tolist()


@pytest.mark.parametrize("host_memory", [True, False])
def test_buffers_take_windows_where_the_group_shares_memory(host_memory: bool) -> None:
    for found in run_ranks(2, one_buffer, host_memory):
        assert found == (host_memory, [3.0, 3.0])


def lost(rank: int) -> Any:
    groups = ProcessGroups.create(Topology(world_size=2))
    window = WindowTensor.zeros(8, dtype=torch.float32, group=groups.world, num_parts=1)
    assert window is not None
    if rank == 1:
        raise ValueError("gone")
    window.start_reduce_scatter(0, 0, 8, op="sum", name="r").wait()


def test_the_end_of_a_rank_is_noticed_and_named() -> None:
    with pytest.raises(RankFailed, match="gone"):
        run_ranks(2, lost)


def waits_for_one_that_left(rank: int) -> str:
    groups = ProcessGroups.create(Topology(world_size=2))
    window = WindowTensor.zeros(8, dtype=torch.float32, group=groups.world, num_parts=1)
    assert window is not None
    if rank == 1:
        del window
        return ""
    with pytest.raises(RuntimeError) as error:
        window.start_reduce_scatter(0, 0, 8, op="sum", name="r").wait()
    return str(error.value)


def test_a_rank_that_has_left_is_named() -> None:
    text = run_ranks(2, waits_for_one_that_left)[0]
    assert "reduce_scatter of bucket 0 over ranks 0, 1 of this host lost a peer: rank 1" in text
    assert "has left the group" in text or "has ended" in text


def refuses(_rank: int) -> str:
    groups = ProcessGroups.create(Topology(world_size=2))
    window = WindowTensor.zeros(8, dtype=torch.float32, group=groups.world, num_parts=1)
    assert window is not None
    with pytest.raises(ValueError, match=r"part must be in \[0, 1\), got 1"):
        window.start_all_gather(1, 0, 8, name="g")
    with pytest.raises(ValueError, match=r"are not in a window of 32"):
        window.start_all_gather(0, 4, 12, name="g").wait()
    return "both"


def test_wrong_parts_and_ranges_are_refused() -> None:
    assert run_ranks(2, refuses) == ["both", "both"]
