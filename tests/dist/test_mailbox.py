"""Messages through shared memory: order, values, backpressure, and lost peers."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from megacore.parallel import Group, ProcessGroups, Topology
from megacore.parallel.host.mailbox import Channel, Mailbox
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist


def world(timeout_s: float = 20.0) -> Group:
    size = torch.distributed.get_world_size()
    return ProcessGroups.create(Topology(world_size=size), timeout_s=timeout_s).world


def open_ring(group: Group, *, depth: int, shape: tuple[int, ...] = (5,)) -> Mailbox:
    """Open a channel from every member to each of the others."""
    mailbox = Mailbox.open(
        {
            (group.position, receiver): Channel(
                receiver=receiver, shape=shape, dtype=torch.float32, depth=depth
            )
            for receiver in range(group.size)
            if receiver != group.position
        },
        group,
    )
    assert mailbox is not None
    return mailbox


def numbered(sender: int, receiver: int, number: int) -> torch.Tensor:
    return torch.arange(5.0) + 1000 * sender + 100 * receiver + number


@pytest.mark.parametrize("depth", [1, 3])
def test_all_send_before_any_receives(depth: int) -> None:
    assert run_ranks(3, wrong_messages, depth) == [[], [], []]


def wrong_messages(rank: int, depth: int) -> list[str]:
    group = world()
    mailbox = open_ring(group, depth=depth)
    others = [other for other in range(group.size) if other != rank]
    wrong = []
    for first in (0, 10):  # slots are used again
        for number in range(first, first + 10):
            for other in others:
                mailbox.send((rank, other), numbered(rank, other, number))
        for other in reversed(others):
            for number in range(first, first + 10):
                message = mailbox.receive((other, rank))
                if not torch.equal(message, numbered(other, rank, number)):
                    wrong.append(f"{number} from {other}: {message.tolist()}")
    mailbox.flush()
    return wrong


def test_shapes_and_dtypes_keep_their_bits() -> None:
    for received in run_ranks(2, other_kinds_of_messages):
        assert received == [True] * 4


def other_kinds_of_messages(rank: int) -> list[bool]:
    group = world()
    kinds: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((), torch.float64),
        ((0, 3), torch.float32),
        ((2, 3, 5), torch.bfloat16),
        ((257,), torch.int64),
    ]
    mailbox = Mailbox.open(
        {
            (rank, kind): Channel(receiver=1 - rank, shape=shape, dtype=dtype, depth=2)
            for kind, (shape, dtype) in enumerate(kinds)
        },
        group,
    )
    assert mailbox is not None

    def message(sender: int, kind: int) -> torch.Tensor:
        shape, dtype = kinds[kind]
        generator = torch.Generator().manual_seed(10 * sender + kind)
        return torch.randint(-9, 9, shape, generator=generator).to(dtype)

    for kind in range(len(kinds)):
        mailbox.send((rank, kind), message(rank, kind))
    received = [mailbox.receive((1 - rank, kind)) for kind in range(len(kinds))]
    return [
        tensor.dtype == kinds[kind][1] and torch.equal(tensor, message(1 - rank, kind))
        for kind, tensor in enumerate(received)
    ]


@pytest.mark.parametrize("unsent", [0, 3])
def test_a_killed_sender_is_named_long_before_the_timeout(unsent: int) -> None:
    first = run_ranks(2, receive_from_a_dead_rank, unsent, may_die=(1,))[0]
    assert "lost a peer: the process of rank 1 (position 1, pid " in first


def receive_from_a_dead_rank(rank: int, unsent: int) -> str:
    group = world(timeout_s=300.0)
    mailbox = open_ring(group, depth=1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:  # noqa: PT012  (any call)
        for _ in range(unsent):
            mailbox.send((0, 1), torch.zeros(5))
        mailbox.receive((1, 0))
    return str(caught.value)


def test_a_receiver_that_takes_nothing_is_named_at_the_timeout() -> None:
    texts = run_ranks(2, flush_to_nobody)
    assert (
        "the receipt of the message in slot 0 over ranks 0, 1 of this host timed out after 0.5 s: "
        "rank 1 (position 1, pid "
    ) in texts[0]


def flush_to_nobody(rank: int) -> str:
    mailbox = open_ring(world(timeout_s=0.5), depth=1)
    text = ""
    if rank == 0:
        for _ in range(2):
            mailbox.send((0, 1), torch.zeros(5))
        with pytest.raises(RuntimeError) as caught:
            mailbox.flush()
        text = str(caught.value)
    torch.distributed.barrier()  # until here both are members
    return text


def test_too_little_memory_leaves_all_members_without() -> None:
    assert run_ranks(2, open_a_huge_one) == [True, True]


def open_a_huge_one(rank: int) -> bool:
    channel = Channel(receiver=0, shape=(1 << 40,), dtype=torch.float32, depth=4)
    channels: dict[Any, Channel] = {"huge": channel} if rank == 1 else {}
    return Mailbox.open(channels, world()) is None
