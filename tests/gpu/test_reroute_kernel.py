"""The kernel that reroutes copies finds the places of the CPU, and can be captured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megacore.moe.echo.reroute import SourceRow, reroute
from megacore.ops import has_cuda_kernels
from megacore.ops.permutation import sort_by_expert
from tests.gpu.test_plan_kernel import random_counts
from tests.support.gpu import capture, poisoned_memory, synchronising_is_an_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_cuda_kernels(), reason="built without CUDA kernels"),
]


def random_case(seed: int, num_ranks: int, num_experts: int) -> tuple[Tensor, Tensor, SourceRow]:
    """Copies, weights and a row of a plan for them, on the CPU."""
    from megacore.moe import plan_offload_on_device

    random = torch.Generator().manual_seed(seed)
    heat = torch.rand(num_experts, generator=random) ** (seed % 5)
    scores = heat + 0.3 * torch.rand(1 + seed % 300, num_experts, generator=random)
    ids = scores.topk(min(num_experts, 1 + seed % 4), dim=-1).indices
    ids = ids.masked_fill(torch.rand(ids.shape, generator=random) < 0.1, -1)
    counts = random_counts(num_ranks, num_experts, seed) % 500
    first = counts[0] % 3
    counts[0] = sort_by_expert(ids, num_experts)[1] + first
    plan = plan_offload_on_device(counts, rank=0, num_spare_slots=1 + seed % 3, tolerance=0.0)
    row = SourceRow(total=counts[0], first=first, slot_expert=plan.slot_expert, tokens=plan.sent)
    return ids, torch.rand(ids.shape, generator=random), row


def on_gpu(row: SourceRow) -> SourceRow:
    return SourceRow(**{name: part.cuda() for name, part in vars(row).items()})


@pytest.mark.parametrize("shape", [(1, 4), (2, 8), (8, 64), (64, 256), (64, 512)])
def test_places_are_those_of_the_cpu(shape: tuple[int, int]) -> None:
    moved = 0
    for seed in range(200 if shape[0] < 64 else 20):
        ids, probs, row = random_case(seed, *shape)
        expected, weights = reroute(ids, probs, row)
        with poisoned_memory():
            places, found = reroute(ids.cuda(), probs.cuda(), on_gpu(row))
        assert torch.equal(places.cpu(), expected), seed
        assert torch.equal(found.cpu(), weights)
        moved += int(row.tokens.sum())
    assert moved > 0 or shape[0] == 1


def test_gradients_come_back_and_a_replay_follows_changing_plans() -> None:
    ids, probs, row = random_case(7, 8, 64)
    static_ids, static_probs, static_row = ids.cuda(), probs.cuda().requires_grad_(), on_gpu(row)
    with synchronising_is_an_error():
        places, weights = reroute(static_ids, static_probs, static_row)
    (grad,) = torch.autograd.grad(weights.sum(), static_probs)
    assert torch.equal(grad, (places >= 0).float())
    graph, outputs = capture(lambda: reroute(static_ids, static_probs.detach(), static_row))
    for seed in range(7, 3007, 300):  # the same shapes
        new_ids, _, new_row = random_case(seed, 8, 64)
        if new_ids.shape != ids.shape or new_row.tokens.shape != row.tokens.shape:
            continue
        static_ids.copy_(new_ids)
        for name, part in vars(new_row).items():
            getattr(static_row, name).copy_(part)
        graph.replay()
        expected, _ = reroute(new_ids, probs, new_row)
        assert torch.equal(outputs[0].cpu(), expected)
