"""The documented planner: the source's worked examples, and bit for bit against the oracle."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megacore.echo_study import documented
from megacore.moe import plan_offload
from tests.support.offload_oracle import documented_plan, overlap_matrix


def test_average_and_spare_capacity_of_the_example() -> None:
    loads = [500, 200, 300, 400]
    average = documented.floor_average(loads)
    assert average == 350
    assert documented.spare_capacity(loads, average) == [0, 150, 50, 0]


@pytest.mark.parametrize(
    ("loads", "expected"),
    [([50, 100, 150, 200], [0, 0, 50, 200]), ([200, 50, 150, 100], [200, 0, 50, 0])],
)
def test_spillover_of_the_example_does_not_depend_on_the_order(
    loads: list[int], expected: list[int]
) -> None:
    spilled = documented.spillover(loads, num_ranks=1, average=250)
    assert spilled == expected
    assert sum(spilled) == sum(loads) - 250


def test_small_overlap_example_as_corrected() -> None:
    assert documented.interval_overlap([100, 150], [80, 120]) == [
        (0, 0, 80),
        (0, 1, 20),
        (1, 1, 100),
    ]
    assert overlap_matrix([100, 150], [80, 120]) == [[80, 20], [0, 100]]


def test_large_overlap_example() -> None:
    pieces = documented.assign_spillover([0, 80, 0, 0, 50, 100, 0, 30], [0, 120, 60, 0])
    assert pieces == [(5, 1, 100), (1, 1, 20), (1, 2, 60)]
    assert documented.top_pieces(pieces, num_spare_slots=2) == [
        (5, 1, 0, 100),
        (1, 1, 1, 20),
        (1, 2, 0, 60),
    ]
    assert documented.top_pieces(pieces, num_spare_slots=1) == [(5, 1, 0, 100), (1, 2, 0, 60)]


def test_two_passes_of_the_example() -> None:
    assert documented.breadth_first_shares([30, 50, 20], [80]) == [[24], [40], [16]]
    floors = documented.breadth_first_shares([30, 50, 20], [83])
    assert floors == [[24], [41], [16]]
    left = [30 - 24, 50 - 41, 20 - 16]
    assert documented.depth_first_shares(left, [83 - 81]) == [[2], [0], [0]]


def test_example_of_two_passes_within_a_plan() -> None:
    # Expert 0 has 100 tokens, the average is 34: ranks 1 and 2 take 33 each, sources give shares.
    counts = np.zeros((3, 3), np.int64)
    counts[:, 0] = [30, 50, 20]
    counts[0, 1:] = [1, 1]
    plan = plan_offload(counts, num_spare_slots=1, method="echo")
    slot_expert, rerouted = documented_plan(counts.tolist(), 1)
    assert plan.slot_expert.tolist() == slot_expert == [[-1], [0], [0]]
    assert plan.rerouted.tolist() == rerouted


def test_steps_reject_negative_sizes_and_impossible_clones() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        documented.interval_overlap([1, -1], [2])
    with pytest.raises(ValueError, match="the expert has 50"):
        documented.breadth_first_shares([30, 20], [51])
    with pytest.raises(ValueError, match="3 experts do not divide over 2 ranks"):
        documented.spillover([1, 2, 3], num_ranks=2, average=1)
    with pytest.raises(ValueError, match="no ranks"):
        documented.floor_average([])


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
        plan = plan_offload(counts, num_spare_slots=num_spare_slots, method="echo")
        slot_expert, rerouted = documented_plan(counts, num_spare_slots)
        assert plan.slot_expert.tolist() == slot_expert, counts
        assert plan.rerouted.tolist() == rerouted, counts


def test_plan_of_a_large_layer_equals_the_oracle() -> None:
    rng = np.random.default_rng(3)
    counts = rng.poisson(rng.lognormal(3.0, 1.0, 96), (24, 96))
    for num_spare_slots in (1, 3):
        plan = plan_offload(counts, num_spare_slots=num_spare_slots, method="echo")
        slot_expert, rerouted = documented_plan(counts.tolist(), num_spare_slots)
        assert plan.slot_expert.tolist() == slot_expert
        assert plan.rerouted.tolist() == rerouted


def test_with_enough_slots_only_the_remainder_stays_above_the_average() -> None:
    rng = np.random.default_rng(4)
    for _ in range(200):
        counts = rng.integers(0, 50, (4, 8))
        plan = plan_offload(counts, num_spare_slots=8, method="echo")
        assert plan.bound == counts.sum() // 4 + counts.sum() % 4
        assert plan.bound_holds
