"""The comparison of schedules: equal work, honest reasons, and what is marked is best."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.pipeline import SCHEDULE_NAMES, Costs
from megacore.pipeline.compare import compare_schedules


@given(st.integers(1, 6), st.integers(1, 14), st.none() | st.integers(1, 3), st.floats(0, 1))
def test_every_schedule_is_compared_or_refused_with_a_reason(
    num_ranks: int, num_microbatches: int, num_chunks: int | None, send: float
) -> None:
    costs = Costs(forward=2.0, backward_input=3.0, backward_weight=1.0, send=send)
    comparison = compare_schedules(
        num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks, costs=costs
    )
    names = [row.schedule.name for row in comparison.rows]
    assert sorted([*names, *comparison.refused]) == sorted(SCHEDULE_NAMES)
    assert all(comparison.refused.values())
    times = [row.timeline.makespan for row in comparison.rows]
    assert times == pytest.approx(sorted(times))
    for row in comparison.rows:
        # The same work in all: every rank runs all microbatches through its layers.
        assert row.timeline.busy == pytest.approx([6.0 * num_microbatches] * num_ranks)
        assert row.bound is not None
        assert row.gap is not None
        assert row.bound.value <= row.timeline.makespan * (1 + 1e-9)
        better = [
            other
            for other in comparison.rows
            if other.timeline.makespan < row.timeline.makespan - 1e-6
            and other.in_flight <= row.in_flight
        ]
        assert not (row.is_best and better)


def test_parameters_are_those_that_the_generators_used() -> None:
    rows = compare_schedules(num_ranks=4, num_microbatches=9, num_chunks=3).rows
    parameters = {row.schedule.name: row.parameters for row in rows}
    assert parameters["interleaved_1f1b"] == {
        "chunks": 3,
        "group_size": 5,
        "warmup_multiplier": 2,
    }
    assert parameters["zb_v"] == {"chunks": 2}
    rows = compare_schedules(num_ranks=4, num_microbatches=8, warmup_multiplier=1).rows
    [row] = [row for row in rows if row.schedule.name == "interleaved_1f1b"]
    assert row.parameters["warmup_multiplier"] == 1


def test_overlap_has_no_bound_where_pairs_are_hidden() -> None:
    comparison = compare_schedules(num_ranks=4, num_microbatches=8, costs=Costs(overlap=1.0))
    without = {row.schedule.name for row in comparison.rows if row.bound is None}
    assert without == {"dualpipe", "dualpipe_v"}


def test_costs_per_stage_are_refused() -> None:
    with pytest.raises(ValueError, match="costs per stage cannot be compared"):
        compare_schedules(num_ranks=2, num_microbatches=2, costs=Costs(forward=[1.0, 2.0]))
