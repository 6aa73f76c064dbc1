"""Ranks that share one device, as processes: what peers exchange, with gloo between the hosts.

    python -m tests.support.shared_gpu CASE RANKS DEVICE

NCCL takes one rank per device, so collectives go through gloo. Rows and clones go through torch's
symmetric memory, which takes several ranks on a device if it is told to. On the CPU the same
cases run over the memory that ranks of a host share.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megacore.moe.dispatchers import (
    ExpertPlacement,
    PeerDispatcher,
    StaticBudget,
    make_peers,
    static_receive_rows,
)
from megacore.moe.echo.clones import FC1, FC2
from megacore.moe.echo.device_plan import plan_offload_on_device
from megacore.moe.echo.memory import make_clone_memory
from megacore.parallel import ProcessGroups, Topology
from megacore.parallel.row_exchange import RowSplits
from tests.dist.test_dispatchers import Choice
from tests.support.gpu import capture

TOKENS, WIDTH, TOP_K = 24, 64, 2


def main() -> int:
    """Run a case on all ranks; 0 if it went well on each."""
    name, num_ranks, device = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=_rank, args=(name, rank, num_ranks, device, store))
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return int(any(process.exitcode for process in ranks))


def _rank(name: str, rank: int, num_ranks: int, device: str, store: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    groups = ProcessGroups.create(Topology(world_size=num_ranks, ep=num_ranks))
    CASES[name](groups, torch.device(device))
    dist.barrier()
    dist.destroy_process_group()


def _choice(rank: int, num_experts: int, number: int, device: torch.device) -> Choice:
    random = torch.Generator().manual_seed(1000 * number + rank)
    scores = torch.rand(TOKENS, num_experts, generator=random)
    scores[:, : 1 + number % 3] += float(number % 2)  # every other one is skewed
    probs, ids = scores.softmax(-1).topk(TOP_K, dim=-1)
    return Choice(probs.to(device), ids.to(device))


def _layer(dispatcher: PeerDispatcher, x: torch.Tensor, choice: Choice) -> torch.Tensor:
    """A layer whose experts multiply by their number: no product, so any device gives its bits."""
    plan = dispatcher.preprocess(choice)
    arrived = dispatcher.dispatch(x, plan, RowSplits()).finish()
    placement = dispatcher.placement
    first = placement.first_local
    ends = arrived.m_splits.cumsum(0)
    rows = torch.arange(arrived.rows.shape[0], device=x.device)
    owner = torch.searchsorted(ends, rows, right=True)
    factor = torch.where(rows < ends[-1], (owner + first + 1).to(x.dtype), 0.0)
    out = arrived.rows * (factor * arrived.probs)[:, None]
    return dispatcher.postprocess(dispatcher.combine(out, arrived, RowSplits()), plan)


def _dispatcher(groups: ProcessGroups, device: torch.device) -> PeerDispatcher:
    placement = ExpertPlacement.of(groups, 4 * groups.ep.size)
    peers = make_peers(groups.etp_ep, device, transport="peer", row_bytes=4 * WIDTH)
    assert peers is not None
    budget = StaticBudget(1e9)
    return PeerDispatcher(
        placement, peers=peers, receive_rows=static_receive_rows(placement, budget, None)
    )


def run_dispatch(groups: ProcessGroups, device: torch.device) -> None:
    """Layers one after another, forward and backward, without waiting in between."""
    dispatcher, rank = _dispatcher(groups, device), groups.ep.position
    num_experts = dispatcher.placement.num_experts
    for number in range(12):
        choice = _choice(rank, num_experts, number, device)
        x = torch.randn(TOKENS, WIDTH).to(device).requires_grad_()
        output = _layer(dispatcher, x, choice)
        output.backward(torch.ones_like(output))
        factor = (choice.probs * (choice.expert_ids + 1)).sum(1, keepdim=True)
        assert x.grad is not None
        torch.testing.assert_close(output, x * factor, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(x.grad, factor.expand_as(x), rtol=1e-5, atol=1e-5)
    dispatcher.peers.check()


def run_captured(groups: ProcessGroups, device: torch.device) -> None:
    """A layer's forward and backward in one graph: replays with new inputs give eager's bits."""
    dispatcher, rank = _dispatcher(groups, device), groups.ep.position
    num_experts = dispatcher.placement.num_experts
    choice = _choice(rank, num_experts, 0, device)
    x = torch.zeros(TOKENS, WIDTH, device=device, requires_grad=True)

    def step() -> tuple[torch.Tensor, ...]:
        output = _layer(dispatcher, x, choice)
        return output, *torch.autograd.grad(output.square().sum(), x)

    replay, static = step, step()
    if device.type == "cuda":
        graph, found = capture(step)
        replay, static = graph.replay, tuple(found)
    for number in range(1, 6):
        new = _choice(rank, num_experts, number, device)
        with torch.no_grad():
            choice.probs.copy_(new.probs)
            choice.expert_ids.copy_(new.expert_ids)
            x.copy_(torch.randn(TOKENS, WIDTH))
        expected = [tensor.clone() for tensor in step()]
        again = replay()
        for tensor, other in zip(again or static, expected, strict=True):
            assert torch.equal(tensor, other)
    dispatcher.peers.check()


def run_clones(groups: ProcessGroups, device: torch.device) -> None:
    """Weights to the slots of other ranks, their gradients back, as ECHO exchanges them."""
    num_ranks, rank, local, slots = groups.ep.size, groups.ep.position, 2, 3
    shapes = {FC1: (16, 8), FC2: (8, 12)}

    def drawn(owner: int, number: int, projection: int, count: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(1000 * number + 10 * owner + projection)
        return torch.randn(count, *shapes[projection], generator=random).to(device)

    like = [drawn(0, 0, projection, local) for projection in (FC1, FC2)]
    (memory,) = make_clone_memory(groups.ep, slots, *like)
    num_clones = 0
    for number in range(8):
        random = torch.Generator().manual_seed(number)
        heat = torch.rand(num_ranks * local, generator=random) ** 4
        counts = (torch.rand(num_ranks, num_ranks * local, generator=random) * heat * 100).long()
        plan = plan_offload_on_device(
            counts.to(device), rank=rank, num_spare_slots=slots, tolerance=0.0
        )
        held = plan.slot_expert.tolist()
        memory.open()
        for projection in (FC1, FC2):
            memory.push(projection, drawn(rank, number, projection, local), plan)
        for projection in (FC2, FC1):
            clones = memory.wait_for_weights(projection, plan)
            for slot, expert in enumerate(held[rank]):
                if expert >= 0:
                    home = drawn(expert // local, number, projection, local)
                    assert torch.equal(clones[slot], home[expert % local])
                    num_clones += 1
        for projection in (FC2, FC1):
            memory.reserve_grads(projection).copy_(drawn(50 + rank, number, projection, slots))
            memory.offer_grads(projection, plan)
            total = drawn(rank, number, projection, local)
            expected = total.clone()
            memory.collect(projection, total, plan)
            for holder in range(num_ranks):
                grads = drawn(50 + holder, number, projection, slots)
                for slot, expert in enumerate(held[holder]):
                    if expert >= 0 and expert // local == rank:
                        expected[expert % local] += grads[slot]
            assert torch.equal(total, expected)
    everyone = torch.tensor(num_clones)
    dist.all_reduce(everyone)
    assert everyone > 0


CASES: dict[str, Callable[[ProcessGroups, torch.device], None]] = {
    "dispatch": run_dispatch,
    "captured": run_captured,
    "clones": run_clones,
}

if __name__ == "__main__":
    raise SystemExit(main())
