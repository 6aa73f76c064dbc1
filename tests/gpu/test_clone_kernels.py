"""Kernels that bring clones and collect their gradients: several members, all on one GPU.

Members are served one after the other, so whatever a kernel polls for has been queued before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megacore.errors import PeerLostError
from megacore.moe.dispatchers import device_peers
from megacore.moe.echo.clones import FC1, FC2
from megacore.moe.echo.device_plan import DevicePlan, plan_offload_on_device
from megacore.moe.echo.memory import DeviceCloneMemory
from megacore.ops import has_cuda_kernels
from megacore.parallel.process_groups import Group
from tests.support.gpu import capture, synchronising_is_an_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_cuda_kernels(), reason="built without CUDA kernels"),
]

LOCAL, SLOTS = 2, 3
# Experts of no multiple of 16 bytes, and of more than all threads copy at once.
SMALL, LARGE = {FC1: (6, 5), FC2: (5, 3)}, {FC1: (512, 136), FC2: (136, 256)}
Shapes = dict[int, tuple[int, int]]


class Team:
    """All members of a group, which reach each other's memory."""

    def __init__(
        self,
        num_members: int,
        shapes: Shapes,
        *,
        dtype: torch.dtype = torch.float32,
        timeout_s: float = 20.0,
    ) -> None:
        self.shapes, self.dtype = shapes, dtype
        options = SimpleNamespace(_timeout=timedelta(seconds=timeout_s))
        handle = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(options=options))
        ranks = tuple(range(num_members))
        like = [torch.empty(LOCAL, *shapes[p], dtype=dtype, device="cuda") for p in (FC1, FC2)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_peers, "symmetric_memory", one_gpu(num_members))
            self.memories = [
                DeviceCloneMemory(Group("ep", ranks, p, handle), SLOTS, *like)  # type: ignore[arg-type]
                for p in ranks
            ]

    def random(self, seed: int, num: int, projection: int, dtype: torch.dtype) -> Tensor:
        """On the host."""
        random = torch.Generator().manual_seed(seed)
        return torch.randn(num, *self.shapes[projection], generator=random).to(dtype)

    def homes(self, round_: int, projection: int) -> list[Tensor]:
        """Weights of each member's experts."""
        return [
            self.random(1000 * round_ + 10 * p + projection, LOCAL, projection, self.dtype)
            for p in range(len(self.memories))
        ]

    def clone_grads(self, round_: int, projection: int) -> list[Tensor]:
        """Gradients in each member's slots."""
        return [
            self.random(
                77_000 + 1000 * round_ + 10 * p + projection, SLOTS, projection, torch.float32
            )
            for p in range(len(self.memories))
        ]

    def bring(self, homes: dict[int, list[Tensor]], plan: DevicePlan) -> dict[int, list[Tensor]]:
        """What lies in all slots, by projection."""
        for memory in self.memories:
            memory.open()
        for memory in self.memories:  # all are open before anyone pushes, also in a graph
            memory._side.wait_stream(torch.cuda.current_stream())
        for projection, weights in homes.items():
            for memory, each in zip(self.memories, weights, strict=True):
                memory.push(projection, each, plan)
        for memory in self.memories:
            memory.join()
        return {
            p: [memory.wait_for_weights(p, plan).clone() for memory in self.memories]
            for p in reversed(homes)
        }

    def collect(
        self, projection: int, grads: list[Tensor], totals: list[Tensor], plan: DevicePlan
    ) -> None:
        """Add gradients in the slots to the totals of the home experts."""
        for memory, each in zip(self.memories, grads, strict=True):
            memory.reserve_grads(projection).copy_(each)
            memory.offer_grads(projection, plan)
        for memory, total in zip(self.memories, totals, strict=True):
            memory.collect(projection, total, plan)

    def check(self) -> None:
        for memory in self.memories:
            memory.check()


def one_gpu(num_members: int) -> Callable[..., tuple[Tensor, Tensor, object]]:
    """What `symmetric_memory` does, for members that are all here; the first who asks makes it."""
    buffers: list[Tensor] = []

    def memory(group: Group, device: torch.device, num_bytes: int) -> tuple[Tensor, Tensor, object]:
        while len(buffers) < num_members:
            buffers.append(torch.zeros(num_bytes, dtype=torch.uint8, device=device))
        addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], device=device)
        return addresses, buffers[group.position], buffers

    return memory


def random_plan(num_members: int, round_: int) -> DevicePlan:
    """Made by the CPU; from none to many clones."""
    random = torch.Generator().manual_seed(round_)
    heat = torch.rand(num_members * LOCAL, generator=random) ** (round_ % 5)
    counts = (torch.rand(num_members, num_members * LOCAL, generator=random) * heat * 100).long()
    return plan_offload_on_device(counts, rank=0, num_spare_slots=SLOTS, tolerance=0.0)


def on_gpu(plan: DevicePlan) -> DevicePlan:
    return replace(plan, slot_expert=plan.slot_expert.cuda())


def check_clones(clones: list[Tensor], homes: list[Tensor], plan: DevicePlan) -> int:
    """Slots in use hold what the homes have; returns how many there are."""
    num_clones = 0
    for rank, held in enumerate(plan.slot_expert.tolist()):
        for slot, expert in enumerate(held):
            if expert >= 0:
                home = homes[expert // LOCAL][expert % LOCAL]
                assert torch.equal(clones[rank][slot].cpu(), home), (rank, slot)
                num_clones += 1
    return num_clones


def sums_on_cpu(totals: list[Tensor], grads: list[Tensor], plan: DevicePlan) -> list[Tensor]:
    """Gradients of clones added to those of their homes by (rank, slot), as the CPU does it."""
    sums = [total.clone() for total in totals]
    for rank, held in enumerate(plan.slot_expert.tolist()):
        for slot, expert in enumerate(held):
            if expert >= 0:
                sums[expert // LOCAL][expert % LOCAL] += grads[rank][slot]
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_members", "shapes"), [(2, SMALL), (3, SMALL), (8, SMALL), (4, LARGE)]
)
def test_clones_are_what_homes_have_and_gradients_are_those_of_the_cpu(
    num_members: int, shapes: Shapes, dtype: torch.dtype
) -> None:
    team = Team(num_members, shapes, dtype=dtype)
    num_clones = 0
    for round_ in range(8):
        plan = random_plan(num_members, round_)
        homes = {p: team.homes(round_, p) for p in (FC1, FC2)}
        device_plan = on_gpu(plan)
        found = team.bring({p: [x.cuda() for x in each] for p, each in homes.items()}, device_plan)
        for projection in (FC2, FC1):
            num_clones += check_clones(found[projection], homes[projection], plan)
            grads = team.clone_grads(round_, projection)
            before = [x.float() for x in homes[projection]]
            totals = [x.cuda() for x in before]
            team.collect(projection, [x.cuda() for x in grads], totals, device_plan)
            for total, expected in zip(totals, sums_on_cpu(before, grads, plan), strict=True):
                assert torch.equal(total.cpu(), expected)
    team.check()
    assert num_clones > 0


def test_a_captured_exchange_follows_changing_plans() -> None:
    team = Team(3, SMALL)
    plan = on_gpu(random_plan(3, 0))
    homes = {p: team.homes(0, p) for p in (FC1, FC2)}
    grads = {p: team.clone_grads(0, p) for p in (FC1, FC2)}
    device_homes = {p: [x.cuda() for x in each] for p, each in homes.items()}
    device_grads = {p: [x.cuda() for x in each] for p, each in grads.items()}

    def run() -> tuple[Tensor, ...]:
        clones = team.bring(device_homes, plan)
        outputs: list[Tensor] = []
        for projection in (FC2, FC1):
            totals = [x.clone() for x in device_homes[projection]]
            team.collect(projection, device_grads[projection], totals, plan)
            outputs += [*clones[projection], *totals]
        return tuple(outputs)

    run()
    with synchronising_is_an_error():
        run()
    graph, outputs = capture(run)
    for seed in range(100):
        now = random_plan(3, seed)
        plan.slot_expert.copy_(now.slot_expert)
        graph.replay()
        for i, projection in enumerate((FC2, FC1)):
            clones, totals = outputs[6 * i : 6 * i + 3], outputs[6 * i + 3 : 6 * i + 6]
            check_clones(clones, homes[projection], now)
            expected = sums_on_cpu(homes[projection], grads[projection], now)
            for total, each in zip(totals, expected, strict=True):
                assert torch.equal(total.cpu(), each), seed
    team.check()


@pytest.mark.parametrize("shapes", [SMALL, LARGE], ids=["small", "large"])
def test_weights_are_pushed_while_gradients_are_collected(shapes: Shapes) -> None:
    """On two streams at the same time, as those of two microbatches are.

    Blocks of both kernels count their arrivals at slots of the same number, and the last one sets
    a flag: with one counter for both, a flag comes too early or never.
    """
    team, num_clones = Team(4, shapes), 0
    hold = getattr(torch._C, "_cuda_sleep", None)
    for round_ in range(3 if hold is None else 50):
        pushed, offered = random_plan(4, round_), random_plan(4, 1000 + round_)
        homes = {p: team.homes(round_, p) for p in (FC1, FC2)}
        grads = {p: team.clone_grads(round_, p) for p in (FC1, FC2)}
        weights = {p: [x.cuda() for x in each] for p, each in homes.items()}
        totals = {p: [x.clone() for x in each] for p, each in weights.items()}
        push_plan, grad_plan = on_gpu(pushed), on_gpu(offered)
        for projection in (FC1, FC2):
            for memory, each in zip(team.memories, grads[projection], strict=True):
                memory.reserve_grads(projection).copy_(each.cuda())
                memory.offer_grads(projection, grad_plan)
        if hold is not None:
            hold(2_000_000)  # about a millisecond, in which all that follows is queued
        for memory in team.memories:
            memory.open()
        for memory in team.memories:  # all are open before anyone pushes
            memory._side.wait_stream(torch.cuda.current_stream())
        for projection in (FC1, FC2):
            for number, memory in enumerate(team.memories):
                memory.push(projection, weights[projection][number], push_plan)
            for number, memory in enumerate(team.memories):
                memory.collect(projection, totals[projection][number], grad_plan)
        for projection in (FC2, FC1):
            clones = [
                memory.wait_for_weights(projection, push_plan).clone() for memory in team.memories
            ]
            num_clones += check_clones(clones, homes[projection], pushed)
            expected = sums_on_cpu(homes[projection], grads[projection], offered)
            for total, sums in zip(totals[projection], expected, strict=True):
                assert torch.equal(total.cpu(), sums), round_
    team.check()
    assert num_clones > 0


def clone_of_expert_0_on_rank_1() -> DevicePlan:
    held = torch.full((2, SLOTS), -1)
    held[1, 1] = 0
    return replace(random_plan(2, 0), slot_expert=held.cuda())


def test_a_member_that_does_not_open_its_slots_is_named_and_keeps_them() -> None:
    team = Team(2, SMALL, timeout_s=0.6)  # a third of it for a kernel
    plan = clone_of_expert_0_on_rank_1()
    here, there = team.memories
    here.open()
    here.push(FC1, team.homes(0, FC1)[0].cuda(), plan)
    with pytest.raises(PeerLostError, match=r"rank 1 did not send or receive .* within 0\.2 s"):
        _check_joined(here)
    assert not there._slots[FC1, False].any()
    # The gradients that follow keep the optimizer from using them.
    total = torch.zeros(LOCAL, *SMALL[FC1], device="cuda")
    here.collect(FC1, total, plan)
    assert total.isnan().any()


@pytest.mark.parametrize("missing", [FC1, FC2])
def test_weights_that_nobody_pushed_are_not_ready(missing: int) -> None:
    team = Team(2, SMALL, timeout_s=0.6)  # a third of it for a kernel
    plan = clone_of_expert_0_on_rank_1()
    here, there = team.memories
    for memory in team.memories:
        memory.open()
    torch.cuda.synchronize()
    pushed = FC1 + FC2 - missing
    here.push(pushed, team.homes(0, pushed)[0].cuda(), plan)
    _check_joined(here)
    there.wait_for_weights(pushed, plan)
    there.check()
    there.wait_for_weights(missing, plan)
    with pytest.raises(PeerLostError, match=r"rank 0 did not send or receive .* within 0\.2 s"):
        there.check()
    # What comes of stale clones is not used, though no expert of this rank has a clone.
    total = torch.zeros(LOCAL, *SMALL[pushed], device="cuda")
    there.collect(pushed, total, plan)
    assert total.isnan().any()


def test_gradients_that_nobody_offered_are_nan() -> None:
    team = Team(2, SMALL, timeout_s=0.6)  # a third of it for a kernel
    plan = clone_of_expert_0_on_rank_1()
    here, there = team.memories
    # Rank 0 counts its own offers; rank 1, which has the clone, makes none.
    here.offer_grads(FC1, plan)
    total = torch.zeros(LOCAL, *SMALL[FC1], device="cuda")
    here.collect(FC1, total, plan)
    with pytest.raises(PeerLostError, match=r"rank 1 did not send or receive .* within 0\.2 s"):
        here.check()
    assert total[0].isnan().any()
    there.check()


def test_gradients_that_nobody_collected_are_not_overwritten_silently() -> None:
    team = Team(2, SMALL, timeout_s=0.6)  # a third of it for a kernel
    plan = clone_of_expert_0_on_rank_1()
    there = team.memories[1]
    there.reserve_grads(FC1).zero_()
    there.offer_grads(FC1, plan)
    there.check()
    there.reserve_grads(FC1)
    with pytest.raises(PeerLostError, match=r"did not send or receive .* within 0\.2 s"):
        there.check()


def test_what_does_not_fit_is_refused() -> None:
    plan = on_gpu(random_plan(2, 0))
    memory = Team(2, SMALL).memories[0]
    with pytest.raises(ValueError, match="layers that share slots have one size"):
        memory.push(FC1, torch.zeros(LOCAL, 4, 4, device="cuda"), plan)
    with pytest.raises(ValueError, match="clones on GPUs take float32, bfloat16 and float16"):
        Team(2, SMALL, dtype=torch.float64)


def _check_joined(memory: DeviceCloneMemory) -> None:
    memory.join()
    memory.check()
