"""The documented planner: the source's worked examples, and bit for bit against the oracle."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megacore.moe import plan_offload
from tests.support.offload_oracle import documented_plan, overlap_matrix, split_sources


def test_small_overlap_example_as_corrected() -> None:
    assert overlap_matrix([100, 150], [80, 120]) == [[80, 20], [0, 100]]


@pytest.mark.parametrize(
    ("num_spare_slots", "slot_expert", "moved"),
    [
        (1, [[-1], [5], [-1], [1]], [[0], [100], [0], [60]]),
        (2, [[-1, -1], [5, 1], [-1, -1], [1, -1]], [[0, 0], [100, 20], [0, 0], [60, 0]]),
    ],
)
def test_large_overlap_example(
    num_spare_slots: int, slot_expert: list[list[int]], moved: list[list[int]]
) -> None:
    # Spillover 80 of expert 1 and 100 of expert 5, room 120 on rank 1 and 60 on rank 3.
    counts = np.zeros((4, 8), np.int64)
    counts[0] = [100, 160, 60, 0, 110, 170, 100, 20]
    plan = plan_offload(counts, num_spare_slots=num_spare_slots, planner="echo")
    assert plan.slot_expert.tolist() == slot_expert
    assert plan.rerouted.sum(axis=0).tolist() == moved


def test_example_of_two_passes_within_a_plan() -> None:
    # Expert 0 has 100 tokens, the average is 34: ranks 1 and 2 take 33 each, sources give shares.
    counts = np.zeros((3, 3), np.int64)
    counts[:, 0] = [30, 50, 20]
    counts[0, 1:] = [1, 1]
    plan = plan_offload(counts, num_spare_slots=1, planner="echo")
    slot_expert, rerouted = documented_plan(counts.tolist(), 1)
    assert plan.slot_expert.tolist() == slot_expert == [[-1], [0], [0]]
    assert plan.rerouted.tolist() == rerouted


def random_counts(rng: random.Random) -> list[list[int]]:
    num_ranks = rng.randint(1, 6)
    num_experts = num_ranks * rng.randint(1, 4)
    largest = rng.choice([1, 2, 5, 40, 1000, 2**24])
    zeros = rng.choice([0.0, 0.3, 0.9])
    popularity = [rng.random() ** rng.choice([0, 1, 4]) for _ in range(num_experts)]
    return [
        [0 if rng.random() < zeros else int(rng.randint(0, largest) * p) for p in popularity]
        for _ in range(num_ranks)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_plan_equals_the_oracle_bit_for_bit(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(3000):
        counts = random_counts(rng)
        num_spare_slots = rng.randint(0, 4)
        plan = plan_offload(counts, num_spare_slots=num_spare_slots, planner="echo")
        slot_expert, rerouted = documented_plan(counts, num_spare_slots)
        assert plan.slot_expert.tolist() == slot_expert, counts
        assert plan.rerouted.tolist() == rerouted, counts


@pytest.mark.parametrize("seed", range(2))
def test_sources_of_balanced_plans_equal_the_oracle(seed: int) -> None:
    rng = random.Random(seed)
    num_clones = 0
    for _ in range(1500):
        counts = random_counts(rng)
        plan = plan_offload(counts, num_spare_slots=rng.randint(1, 4), tolerance=0.0)
        moved = plan.rerouted.sum(axis=0).tolist()
        expected = split_sources(counts, plan.slot_expert.tolist(), moved, locality_first=True)
        assert plan.rerouted.tolist() == expected, counts
        num_clones += plan.num_clones
    assert num_clones > 1000


def test_plan_of_a_large_layer_equals_the_oracle() -> None:
    rng = np.random.default_rng(3)
    counts = rng.poisson(rng.lognormal(3.0, 1.0, 96), (24, 96))
    for num_spare_slots in (1, 3):
        plan = plan_offload(counts, num_spare_slots=num_spare_slots, planner="echo")
        slot_expert, rerouted = documented_plan(counts.tolist(), num_spare_slots)
        assert plan.slot_expert.tolist() == slot_expert
        assert plan.rerouted.tolist() == rerouted


def test_with_enough_slots_only_the_remainder_stays_above_the_average() -> None:
    rng = np.random.default_rng(4)
    for _ in range(200):
        counts = rng.integers(0, 50, (4, 8))
        plan = plan_offload(counts, num_spare_slots=8, planner="echo")
        assert plan.bound == counts.sum() // 4 + counts.sum() % 4
        assert plan.bound_holds
