"""All-to-all through shared memory: the rows of gloo, any sizes, and every failure told."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megacore.parallel import Group, ProcessGroups, Topology
from megacore.parallel.collectives import barrier
from megacore.parallel.host.row_all_to_all import NUM_EXCHANGES
from megacore.parallel.row_exchange import RowSplits, all_to_all_async, start_exchange
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist


def world(*, host_memory: bool = True, timeout_s: float = 20.0) -> Group:
    size = torch.distributed.get_world_size()
    return ProcessGroups.create(
        Topology(world_size=size), host_memory=host_memory, timeout_s=timeout_s
    ).world


def test_any_splits_give_the_rows_of_gloo() -> None:
    assert run_ranks(3, differences_to_gloo) == [[], [], []]


def differences_to_gloo(rank: int) -> list[str]:
    shared, gloo = world(), world(host_memory=False)
    size = shared.size
    same = random.Random(5)  # equal on all ranks
    wrong = []
    for _ in range(10):
        in_flight: list[tuple[Tensor, Tensor]] = []
        pending = []
        for _ in range(same.randint(1, 5)):
            largest = same.choice([0, 1, 40, 3000])
            counts = [[same.randint(0, largest) for _ in range(size)] for _ in range(size)]
            width = same.choice([(), (3,), (2, 5)])
            dtype = same.choice([torch.float32, torch.bfloat16, torch.int64])
            rows = torch.randn(sum(counts[rank]), *width).mul(50).to(dtype)
            splits = RowSplits(tuple(counts[rank]), tuple(row[rank] for row in counts))
            got, ours = all_to_all_async(rows, shared, splits)
            expected, theirs = all_to_all_async(rows, gloo, splits)
            in_flight.append((got, expected))
            pending += [ours, theirs]
        for work in pending:
            work.wait()
        wrong += [f"{a.shape}" for a, b in in_flight if not torch.equal(a, b)]
    return wrong


def test_more_exchanges_than_slots_and_more_rows_than_before() -> None:
    assert run_ranks(2, growing_exchanges) == [True, True]


def growing_exchanges(rank: int) -> bool:
    group = world()
    right = True
    for number in range(2 * NUM_EXCHANGES + 5):
        rows = torch.full((2 * (number + 1), 33), float(rank + 10 * number))
        got, pending = all_to_all_async(rows, group, RowSplits())
        pending.wait()
        right &= got[: number + 1].eq(10.0 * number).all().item()
        right &= got[number + 1 :].eq(10.0 * number + 1).all().item()
    return right


def test_rows_sent_are_free_once_an_exchange_has_finished() -> None:
    assert run_ranks(2, rows_alive_after_exchanges) == [[False, False]] * 2


def rows_alive_after_exchanges(_rank: int) -> list[bool]:
    """Whether rows still exist between the forward and the backward pass, shared memory and gloo.

    Autograd keeps the exchange until then: it must not keep the rows, one copy for every layer.
    """
    alive = []
    for group in (world(), world(host_memory=False)):
        leaf = torch.ones(4, 3, requires_grad=True)
        rows = leaf * 2
        sent = StorageWeakRef(rows.untyped_storage())
        got = start_exchange(rows, group, RowSplits()).finish()
        del rows
        # The thread of gloo drops its references a moment after the transfer has ended.
        end = time.monotonic() + 10
        while not sent.expired() and time.monotonic() < end:
            time.sleep(0.001)
        alive.append(not sent.expired())
        got.sum().backward()
        assert leaf.grad is not None
        assert bool((leaf.grad == 2).all())
    return alive


def test_splits_that_do_not_match_are_told_and_the_group_goes_on() -> None:
    for text in run_ranks(2, message_of_a_mismatch):
        assert "position 0 expects 12 bytes from position 1, which sends 8" in text


def message_of_a_mismatch(rank: int) -> str:
    group = world()
    splits = RowSplits((1, 1), (1, 3)) if rank == 0 else RowSplits((2, 1), (1, 1))
    rows = torch.zeros(sum(splits.sent or ()))
    _, pending = all_to_all_async(rows, group, splits)
    text = "position 0 expects 12 bytes from position 1, which sends 8"
    if rank == 0:
        with pytest.raises(RuntimeError) as caught:
            pending.wait()
        text = str(caught.value)
    else:
        pending.wait()
    got, pending = all_to_all_async(torch.arange(2.0), group, RowSplits())
    pending.wait()
    assert got.tolist() == [float(rank)] * 2
    return text


def test_a_killed_member_is_named_long_before_the_timeout() -> None:
    text = run_ranks(2, exchange_with_a_dead_rank, may_die=(1,))[0]
    assert "lost a peer: the process of rank 1 (position 1, pid " in text


def exchange_with_a_dead_rank(rank: int) -> str:
    group = world(timeout_s=300.0)
    rows = torch.ones(2, 4)
    _, pending = all_to_all_async(rows, group, RowSplits())
    pending.wait()
    barrier(group)  # both have read the rows
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:  # noqa: PT012  (either call)
        _, pending = all_to_all_async(rows, group, RowSplits())
        pending.wait()
    return str(caught.value)
