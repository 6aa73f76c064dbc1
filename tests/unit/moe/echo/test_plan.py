"""The plan as a Python value: promises on arbitrary inputs, friendly errors, text."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megacore.moe import OffloadPlan, plan_offload
from tests.support.offload_oracle import violations

COUNTS = np.array([[30, 10], [50, 10]])


def bound_of(counts: np.ndarray, tolerance: str) -> int:
    """The goal load, in exact fractions."""
    average = Fraction(int(counts.sum()), len(counts))
    return max(-(-average // 1), average * (1 + Fraction(tolerance)) // 1)


@st.composite
def layers(draw: st.DrawFn) -> np.ndarray:
    num_ranks = draw(st.integers(1, 8))
    shape = (num_ranks, num_ranks * draw(st.integers(1, 6)))
    largest = draw(st.sampled_from([1, 3, 100, 2**24]))
    fill = draw(st.sampled_from([None, st.just(0)]))
    return draw(hnp.arrays(np.int64, shape, elements=st.integers(0, largest), fill=fill))


@given(layers(), st.integers(0, 8), st.sampled_from(["0", "0.01", "0.3"]))
def test_balanced_plan_keeps_its_promises(
    counts: np.ndarray, num_spare_slots: int, tolerance: str
) -> None:
    plan = plan_offload(counts, num_spare_slots=num_spare_slots, tolerance=float(tolerance))
    bound = bound_of(counts, tolerance)
    assert not violations(counts, plan, num_spare_slots=num_spare_slots, bound=bound)


@given(layers(), st.integers(0, 8))
def test_documented_plan_keeps_its_promises(counts: np.ndarray, num_spare_slots: int) -> None:
    plan = plan_offload(counts, num_spare_slots=num_spare_slots, planner="echo")
    bound = counts.sum() // len(counts) + counts.sum() % len(counts)
    assert not violations(counts, plan, num_spare_slots=num_spare_slots, bound=bound)


@given(layers(), st.integers(1, 4))
def test_a_clone_serves_the_tokens_of_its_own_rank_first(counts: np.ndarray, slots: int) -> None:
    plan = plan_offload(counts, num_spare_slots=slots, tolerance=0.0)
    for rank, slot in np.argwhere(plan.slot_expert >= 0):
        expert = plan.slot_expert[rank, slot]
        served = plan.rerouted[:, rank, slot].sum()
        assert plan.rerouted[rank, rank, slot] == min(served, counts[rank, expert])


@given(layers(), st.integers(1, 3), st.data())
def test_domains_change_where_clones_go_but_not_the_guarantee(
    counts: np.ndarray, slots: int, data: st.DataObject
) -> None:
    num_ranks = len(counts)
    divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    domain = data.draw(st.sampled_from(divisors))
    slots = max(slots, counts.shape[1] // num_ranks)
    plan = plan_offload(counts, num_spare_slots=slots, tolerance=0.0, domain_size=domain)
    assert not violations(counts, plan, num_spare_slots=slots, bound=bound_of(counts, "0"))


def test_clones_stay_in_domains_that_can_settle_themselves() -> None:
    counts = np.tile([90, 30, 10, 30, 80, 60, 20, 0], (8, 1))  # both domains have 160 a source
    anywhere = plan_offload(counts, num_spare_slots=1, tolerance=0.0)
    inside = plan_offload(counts, num_spare_slots=1, tolerance=0.0, domain_size=4)
    assert inside.bound_holds
    rank, slot = np.nonzero(inside.slot_expert >= 0)
    assert np.array_equal(inside.slot_expert[rank, slot] // 4, rank // 4)
    rank, slot = np.nonzero(anywhere.slot_expert >= 0)
    assert not np.array_equal(anywhere.slot_expert[rank, slot] // 4, rank // 4)


@pytest.mark.parametrize(
    "counts",
    [
        COUNTS.astype(np.uint8),
        COUNTS.astype(np.int32),
        COUNTS.astype(np.uint64),
        COUNTS.astype(">i8"),
        np.asfortranarray(COUNTS),
        np.repeat(COUNTS, 2, axis=1)[:, ::2],
        COUNTS.tolist(),
        torch.tensor(COUNTS),
        torch.tensor(COUNTS.T.copy(), dtype=torch.int32).t(),
    ],
)
def test_every_integer_type_and_layout_gives_the_same_plan(counts: object) -> None:
    assert plan_offload(counts, num_spare_slots=1) == plan_offload(COUNTS, num_spare_slots=1)


def test_plans_differ_when_something_in_them_does() -> None:
    plan = plan_offload(COUNTS, num_spare_slots=1)
    assert plan != plan_offload(COUNTS, num_spare_slots=1, planner="echo")
    assert plan != plan_offload(COUNTS + 1, num_spare_slots=1)
    assert plan != "plan"


def test_plan_is_read_only_and_outlives_its_native_twin() -> None:
    plan = plan_offload(np.eye(4, dtype=np.int64) * 0 + [1000, 0, 0, 7], num_spare_slots=1)
    for array in (plan.slot_expert, plan.rerouted, plan.load_before, plan.load_after):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.max_load = 3  # type: ignore[misc]
    loads = plan.load_after
    expected = loads.tolist()
    del plan
    plan_offload(np.ones((4, 4), np.int64), num_spare_slots=1)
    assert loads.tolist() == expected


def test_tolerance_and_least_imbalance_save_clones() -> None:
    counts = np.tile([104, 100, 100, 96], (4, 1))
    assert plan_offload(counts, num_spare_slots=1, tolerance=0.0).num_clones == 1
    assert plan_offload(counts, num_spare_slots=1, tolerance=0.04).num_clones == 0
    lazy = plan_offload(counts, num_spare_slots=1, tolerance=0.0, min_imbalance=1.04)
    assert (lazy.num_clones, lazy.bound, lazy.bound_holds) == (0, 416, True)


def test_no_tokens_need_no_clones() -> None:
    for method in ("balanced", "echo"):
        plan = plan_offload(np.zeros((4, 8), np.int64), num_spare_slots=2, planner=method)
        assert plan.num_clones == plan.max_load == plan.bound == 0
        assert plan.imbalance_before == plan.imbalance_after == 1.0


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        ([[1, 2, 3], [4, 5, 6]], {}, r"3 experts do not divide over 2 ranks.* 2 or 4"),
        ([[1], [4]], {}, r"1 experts do not divide over 2 ranks.* are 2$"),
        ([[1, 2], [3, -4]], {}, r"rank 1 for expert 1 is -4"),
        ([[1.0, 2.0], [3.0, 4.0]], {}, "float64; numbers of tokens are integers"),
        (torch.ones(2, 2, dtype=torch.bfloat16), {}, "bfloat16; numbers of tokens are integers"),
        ([[True, False], [True, True]], {}, "bool; numbers of tokens are integers"),
        ([1, 2, 3, 4], {}, r"shape \(4,\).*source ranks x experts"),
        (np.zeros((0, 4), np.int64), {}, r"shape \(0, 4\).*at least 1"),
        (np.full((2, 2), 2**63, np.uint64), {}, "9223372036854775808"),
        ([[2**31, 0], [0, 0]], {}, "more than 2147483647 tokens"),
        (COUNTS, {"num_spare_slots": -1}, r"num_spare_slots must be in \[0, 1024\], got -1"),
        (
            COUNTS,
            {"num_spare_slots": 10**6},
            r"num_spare_slots must be in \[0, 1024\], got 1000000",
        ),
        (COUNTS, {"planner": "balance"}, "'balance'.*did you mean.*balanced"),
        (COUNTS, {"planner": "x"}, "'x'.*balanced and echo"),
        (COUNTS, {"tolerance": -0.1}, r"tolerance is -0.1.*\[0, 1\]"),
        (COUNTS, {"tolerance": float("nan")}, "tolerance is nan"),
        (COUNTS, {"min_imbalance": 0.9}, "min_imbalance is 0.9"),
        (COUNTS, {"domain_size": 0}, "domain_size is 0"),
        (COUNTS, {"domain_size": 3}, "domain_size is 3; it must divide the number of ranks, 2"),
        (COUNTS, {"domain_size": 2, "planner": "echo"}, "only the balanced planner"),
    ],
)
def test_mistakes_are_explained(counts: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_offload(counts, **{"num_spare_slots": 1, **options})  # type: ignore[arg-type]


def test_text_shows_every_rank_and_clone() -> None:
    counts = np.tile([50, 50, 2, 10, 8, 0, 30, 10], (4, 1))
    plan = plan_offload(counts, num_spare_slots=2, tolerance=0.0)
    assert plan.to_text().splitlines() == [
        "balanced plan: 4 ranks, 8 experts, 2 spare slots each; 2 clones, 240 tokens moved",
        "load of the fullest rank 400 -> 160, mean 160.0, imbalance 2.500 -> 1.000; "
        "bound 160 holds",
        "rank  before  after  clones (expert < home rank: tokens)",
        "   0     400    160",
        "   1      48    160  1 < 0: 112",
        "   2      32    160  0 < 0: 128",
        "   3     160    160",
    ]


GOLDEN = Path(__file__).parents[3] / "golden" / "offload_plan.txt"


def golden_plans() -> str:
    """Plans of 8 ranks x 32 experts whose counts follow from a formula, easy to redo anywhere."""
    source, expert = np.meshgrid(np.arange(8), np.arange(32), indexing="ij")
    counts = (expert * expert * 37 + source * 11 + expert * source * 5) % 97 + 300 * (
        expert % 9 == 2
    )
    plans = [
        plan_offload(counts, num_spare_slots=slots, **options)
        for slots in (1, 4)
        for options in ({"planner": "echo"}, {"tolerance": 0.0}, {}, {"domain_size": 4})
    ]
    return "\n\n".join(plan.to_text() for plan in plans) + "\n"


def test_plans_stay_as_they_were() -> None:
    assert golden_plans() == GOLDEN.read_text()


def test_text_says_when_the_bound_is_exceeded() -> None:
    counts = np.tile([50, 50, 50, 50, 0, 0, 0, 0], (2, 1))
    plan = plan_offload(counts, num_spare_slots=1, tolerance=0.0)
    assert isinstance(plan, OffloadPlan)
    assert not plan.bound_holds
    assert "bound 200 is exceeded" in plan.to_text()
