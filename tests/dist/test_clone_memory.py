"""Clones through shared memory: what arrives, what is added up, and that it equals messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.moe.echo.clones import FC1, FC2
from megacore.moe.echo.device_plan import DevicePlan, plan_offload_on_device
from megacore.moe.echo.memory import HostCloneMemory, make_clone_memory
from megacore.moe.echo.slots import SlotBuffers
from megacore.ops.echo_counts import BYTES_SENT
from megacore.parallel import Topology
from megacore.parallel.process_groups import ProcessGroups
from tests.dist.test_echo import skewed_trainer
from tests.support.distributed import run_ranks

LOCAL, SLOTS, ROUNDS = 2, 3, 25
SHAPES = {FC1: (6, 5), FC2: (5, 3)}


def home_weights(rank: int, round_: int, projection: int) -> Tensor:
    """What any rank can tell of another one's experts."""
    random = torch.Generator().manual_seed(1000 * round_ + 10 * rank + projection)
    return torch.randn(LOCAL, *SHAPES[projection], generator=random)


def clone_grads(rank: int, round_: int, projection: int) -> Tensor:
    random = torch.Generator().manual_seed(77_000 + 1000 * round_ + 10 * rank + projection)
    return torch.randn(SLOTS, *SHAPES[projection], generator=random)


def random_plan(num_ranks: int, round_: int) -> DevicePlan:
    """From none to many clones."""
    random = torch.Generator().manual_seed(round_)
    heat = torch.rand(num_ranks * LOCAL, generator=random) ** (round_ % 5)
    counts = (torch.rand(num_ranks, num_ranks * LOCAL, generator=random) * heat * 100).long()
    return plan_offload_on_device(counts, rank=0, num_spare_slots=SLOTS, tolerance=0.0)


def move_clones(rank: int, num_ranks: int) -> int:
    groups = ProcessGroups.create(Topology(world_size=num_ranks, ep=num_ranks))
    like = [home_weights(0, 0, projection) for projection in (FC1, FC2)]
    (memory,) = make_clone_memory(groups.ep, SLOTS, *like)
    assert isinstance(memory, HostCloneMemory)
    num_clones = 0
    for round_ in range(ROUNDS):
        plan = random_plan(num_ranks, round_)
        held = plan.slot_expert.tolist()
        memory.open()
        for projection in (FC1, FC2):
            memory.push(projection, home_weights(rank, round_, projection), plan)
        for projection in (FC2, FC1):
            clones = memory.wait_for_weights(projection, plan)
            for slot, expert in enumerate(held[rank]):
                if expert >= 0:
                    home = home_weights(expert // LOCAL, round_, projection)
                    assert torch.equal(clones[slot], home[expert % LOCAL])
                    num_clones += 1
        for projection in (FC2, FC1):
            memory.reserve_grads(projection).copy_(clone_grads(rank, round_, projection))
            memory.offer_grads(projection, plan)
            total = home_weights(rank, round_, projection)
            expected = total.clone()
            memory.collect(projection, total, plan)
            for holder in range(num_ranks):
                for slot, expert in enumerate(held[holder]):
                    if expert // LOCAL == rank and expert >= 0:
                        expected[expert % LOCAL] += clone_grads(holder, round_, projection)[slot]
            assert torch.equal(total, expected)
    with pytest.raises(ValueError, match="layers that share slots have one size"):
        memory.push(FC1, torch.zeros(LOCAL, 4, 4), plan)
    return num_clones


@pytest.mark.dist
def test_clones_are_what_homes_have_and_gradients_are_added_in_order() -> None:
    assert sum(run_ranks(3, move_clones, 3, timeout_s=120)) > 50


def train_with(_rank: int, dispatcher: str) -> tuple[list[list[float]], list[str]]:
    changes: dict[str, Any] = {
        "parallel.ep": 2,
        "moe.dispatcher": dispatcher,
        "moe.echo.num_spare_slots": 2,
        "moe.echo.tolerance": 0.0,
        "train.microbatch_size": 1,
    }
    messages = (
        {"moe.static_transport": "collective"}
        if dispatcher == "static"
        else {"run.host_memory": False}
    )
    found, kinds = [], []
    for transport in ({}, messages):
        trainer = skewed_trainer(2, {**changes, **transport})
        found.append([trainer.train_step(step).loss for step in range(5)])
        (chunk,) = trainer.chunks
        for layer in chunk.moe_layers().values():
            assert layer.echo is not None
            assert layer.echo.sums[BYTES_SENT] > 0
            kinds.append("memory" if layer.echo.slots._memory else "messages")
    return found, list(dict.fromkeys(kinds))


@pytest.mark.dist
@pytest.mark.parametrize("dispatcher", ["static", "alltoall", "allgather"])
def test_memory_and_messages_give_the_same_bits(dispatcher: str) -> None:
    for (memory, messages), kinds in run_ranks(2, train_with, dispatcher, timeout_s=120):
        assert memory == messages
        assert kinds == ["memory", "messages"]


def lose_a_rank(rank: int) -> str:
    groups = ProcessGroups.create(Topology(world_size=2, ep=2))
    like = [home_weights(0, 0, projection) for projection in (FC1, FC2)]
    (memory,) = make_clone_memory(groups.ep, SLOTS, *like)
    if rank == 1:
        return ""  # and its process ends
    memory.open()
    with pytest.raises(RuntimeError) as caught:
        memory.push(FC1, like[FC1], random_plan(2, 3))
    return str(caught.value)


@pytest.mark.dist
def test_a_rank_that_has_gone_is_named() -> None:
    message, _ = run_ranks(2, lose_a_rank, timeout_s=60)
    assert "lost a peer" in message
    assert "rank 1" in message


def try_faulty_memory(rank: int, way: str) -> list[str]:
    groups = ProcessGroups.create(Topology(world_size=3, ep=3))
    like = [home_weights(0, 0, projection) for projection in (FC1, FC2)]
    assert len(SlotBuffers(SLOTS).memory(groups.ep, *like)) == 1
    real = getattr(HostCloneMemory, way)

    def faulty(memory: HostCloneMemory, projection: int, tensor: Tensor, plan: DevicePlan) -> None:
        if way == "push":
            real(memory, projection, tensor + (rank == 1), plan)
            return
        real(memory, projection, tensor, plan)
        tensor += rank == 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostCloneMemory, way, faulty)
        with pytest.warns(UserWarning, match="exchanges clones by messages") as caught:
            assert SlotBuffers(SLOTS).memory(groups.ep, *like) == ()
    return [str(each.message) for each in caught]


@pytest.mark.dist
@pytest.mark.parametrize(("way", "named"), [("push", "on rank 0"), ("collect", "on rank 1")])
def test_memory_in_which_clones_do_not_arrive_is_not_used(way: str, named: str) -> None:
    for (message,) in run_ranks(3, try_faulty_memory, way):
        assert message.startswith("group ep exchanges clones by messages, not in memory of peers")
        assert message.endswith(named)
