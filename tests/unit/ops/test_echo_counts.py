"""Counters of layers with clones: native, and by torch operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from megacore.ops import echo_counts
from megacore.ops.echo_counts import count_held_, count_plan_


def random_plan(num_ranks: int, local: int, num_slots: int) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(num_ranks)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random)

    return (
        numbers(-1, num_ranks * local, num_ranks, num_slots),
        numbers(0, 10**6, num_ranks),
        torch.tensor([1234, 5, 1300, 1, 1, 77]),
        torch.tensor([98_765]),
        numbers(0, 1000, num_ranks * (local + num_slots)),
    )


@pytest.mark.parametrize("sizes", [(1, 1, 0), (2, 4, 2), (8, 16, 3)])
def test_native_counters_are_those_of_torch(sizes: tuple[int, int, int]) -> None:
    plan, num_experts = random_plan(*sizes), sizes[0] * sizes[1]
    results = []
    for count in (count_plan_, echo_counts._count_plan_reference):
        sums = torch.full((8,), 0.25, dtype=torch.float64)
        results.append((count(sums, *plan, num_experts), sums))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_bytes_of_held_slots() -> None:
    slots = torch.tensor([[-1, 0], [3, 7]])
    sums = torch.zeros(8, dtype=torch.float64)
    count_held_(sums, slots, 0, 4, 10)
    echo_counts._count_held_reference(sums, slots, 4, 8, 1)
    assert sums.tolist() == [0, 0, 0, 0, 0, 0, 21.0, 0]


def test_torch_knows_the_operations() -> None:
    sums, plan = torch.zeros(8, dtype=torch.float64), random_plan(2, 4, 2)
    checks = ("test_schema", "test_faketensor")
    opcheck(torch.ops.megacore.count_plan_.default, (sums, *plan, 8), test_utils=checks)
    opcheck(torch.ops.megacore.count_held_.default, (sums, plan[0], 0, 4, 10), test_utils=checks)
