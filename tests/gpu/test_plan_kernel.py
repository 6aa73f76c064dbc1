"""The planner of the GPU makes the plans of the CPU, bit for bit, and nothing waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.moe import plan_offload, plan_offload_on_device
from megacore.moe.echo.device_plan import DevicePlan
from megacore.ops import has_cuda_kernels
from megacore.ops.echo_counts import count_held_, count_plan_
from tests.support.gpu import capture, poisoned_memory, synchronising_is_an_error
from tests.support.offload_parts import numbers_of, part_of_rank
from tests.unit.ops.test_echo_counts import random_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_cuda_kernels(), reason="built without CUDA kernels"),
]


def random_counts(num_ranks: int, num_experts: int, seed: int) -> Tensor:
    """From even to one hot expert, some experts and ranks empty."""
    random = torch.Generator().manual_seed(seed)
    heat = torch.rand(num_experts, generator=random) ** (seed % 6)
    heat[torch.rand(num_experts, generator=random) < 0.1 * (seed % 4)] = 0.0
    most = [8, 300, 5000, 1 << 24][seed % 4]
    if seed % 7 == 3:
        heat = torch.zeros(num_experts)
        heat[seed % num_experts] = 1.0
    draws = torch.rand(num_ranks, num_experts, generator=random, dtype=torch.float64)
    return (draws * heat * most).long()


def options(seed: int, num_ranks: int) -> dict[str, Any]:
    planner = "echo" if seed % 5 == 4 else "balanced"
    domain = num_ranks // 2 if seed % 3 == 1 and num_ranks % 2 == 0 else None
    return {
        "num_spare_slots": seed % 4,
        "planner": planner,
        "tolerance": [0.0, 0.01, 0.05][seed % 3],
        "min_imbalance": 1.2 if seed % 11 == 0 else 1.0,
        "domain_size": domain if planner == "balanced" else None,
    }


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (4, 8), (7, 21), (8, 64), (32, 128)])
def test_plans_are_those_of_the_cpu(shape: tuple[int, int]) -> None:
    num_clones = 0
    for seed in range(300):
        counts = random_counts(*shape, seed)
        with poisoned_memory():
            plan = plan_offload_on_device(
                counts.cuda(), rank=seed % shape[0], **options(seed, shape[0])
            )
        expected = plan_offload(counts, **options(seed, shape[0]))
        assert numbers_of(plan) == part_of_rank(expected, counts, seed % shape[0]), seed
        num_clones += expected.num_clones
    assert num_clones > 0 or shape[0] == 1


@pytest.mark.parametrize("num_experts", [256, 512])
def test_plans_of_64_ranks_are_those_of_the_cpu(num_experts: int) -> None:
    for seed in range(60):
        counts = random_counts(64, num_experts, seed)
        with poisoned_memory():
            plan = plan_offload_on_device(counts.cuda(), rank=seed, **options(seed, 64))
        expected = plan_offload(counts, **options(seed, 64))
        assert numbers_of(plan) == part_of_rank(expected, counts, seed), seed


def test_a_captured_plan_follows_changing_counts() -> None:
    static = random_counts(16, 64, 0).cuda()

    def run() -> DevicePlan:
        return plan_offload_on_device(static, rank=3, num_spare_slots=2)

    with synchronising_is_an_error():
        run()
    graph, plan = capture(run)
    for seed in range(20):
        counts = random_counts(16, 64, seed)
        static.copy_(counts)
        graph.replay()
        expected = plan_offload(counts, num_spare_slots=2)
        assert numbers_of(plan) == part_of_rank(expected, counts, 3)


def test_invalid_counts_are_marked() -> None:
    for bad in (-1, 1 << 31):
        counts = torch.full((2, 4), 5, device="cuda")
        counts[1, 2] = bad
        plan = plan_offload_on_device(counts, rank=0, num_spare_slots=1)
        assert plan.summary[4].item() == 0
        assert plan.slot_expert.tolist() == [[-1], [-1]]
        with pytest.raises(ValueError, match="invalid counts"):
            plan.read_slots()


@pytest.mark.real_gpu
def test_a_problem_too_large_for_the_kernel_is_planned_by_the_cpu() -> None:
    counts = random_counts(512, 2048, 1)
    plan = plan_offload_on_device(counts.cuda(), rank=9, num_spare_slots=64)
    expected = plan_offload_on_device(counts, rank=9, num_spare_slots=64)
    assert numbers_of(plan) == numbers_of(expected)


def test_counters_are_those_of_the_cpu() -> None:
    plan = random_plan(8, 16, 3)
    on_host = torch.zeros(8, dtype=torch.float64)
    on_device = on_host.cuda()
    expected = count_plan_(on_host, *plan, 128)
    found = count_plan_(on_device, *(part.cuda() for part in plan), 128)
    count_held_(on_host, plan[0], 5, 40, 1000)
    count_held_(on_device, plan[0].cuda(), 5, 40, 1000)
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(on_device.cpu(), on_host)
