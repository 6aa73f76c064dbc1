from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.report.series import (
    finite_points,
    nice_axis,
    nice_step,
    number_text,
    smooth,
    thin,
    tight_axis,
)

values = st.floats(-1e9, 1e9, allow_nan=False)
curves = st.lists(values, min_size=1, max_size=200).map(
    lambda ys: [(float(x), y) for x, y in enumerate(ys)]
)


@given(low=values, high=values, num_ticks=st.integers(2, 12))
def test_a_nice_axis_holds_its_range_between_even_ticks(
    low: float, high: float, num_ticks: int
) -> None:
    low, high = min(low, high), max(low, high)
    if high - low < 1e-6 * max(abs(low), abs(high)):
        return
    axis = nice_axis(low, high, num_ticks=num_ticks)
    slack = 1e-6 * (high - low)
    assert axis.low <= low + slack
    assert axis.high >= high - slack
    assert axis.ticks[0] == axis.low
    assert axis.ticks[-1] == axis.high
    assert 2 <= len(axis.ticks) <= 2 * num_ticks + 2


def test_equal_values_still_make_an_axis() -> None:
    axis = nice_axis(2.0, 2.0, num_ticks=4)
    assert axis.low < 2.0 < axis.high
    assert nice_axis(0.0, 0.0, num_ticks=4).high > 0
    assert tight_axis(7, 7, num_ticks=4).ticks == (7,)


@given(st.floats(1e-9, 1e12))
def test_a_nice_step_is_one_two_or_five_times_a_power_of_ten(rough: float) -> None:
    step = nice_step(rough)
    leading = float(f"{step:.6e}".split("e")[0])
    assert leading in (1.0, 2.0, 5.0)
    assert 0.6 < step / rough < 1.6


@given(low=st.integers(0, 1000), length=st.integers(1, 10**6))
def test_step_ticks_are_whole_and_inside(low: int, length: int) -> None:
    axis = tight_axis(low, low + length, num_ticks=6)
    assert (axis.low, axis.high) == (low, low + length)
    assert all(tick == int(tick) and low <= tick <= low + length for tick in axis.ticks)
    assert len(axis.ticks) <= 13


@given(points=curves, window=st.integers(1, 21))
def test_smoothing_keeps_ends_range_and_places(
    points: list[tuple[float, float]], window: int
) -> None:
    result = smooth(points, window=window)
    scale = max(abs(y) for _, y in points) * 1e-6 + 1e-9
    assert [x for x, _ in result] == [x for x, _ in points]
    assert result[0][1] == pytest.approx(points[0][1], abs=scale)
    assert result[-1][1] == pytest.approx(points[-1][1], abs=scale)
    assert max(y for _, y in result) <= max(y for _, y in points) + scale


def test_smoothing_a_straight_line_changes_nothing() -> None:
    line = [(float(x), 2.0 * x) for x in range(50)]
    assert [y for _, y in smooth(line, window=9)] == pytest.approx([y for _, y in line])


@given(points=curves, limit=st.integers(4, 50))
def test_thinning_keeps_extremes_and_order(points: list[tuple[float, float]], limit: int) -> None:
    kept = thin(points, limit=limit)
    assert len(kept) <= max(limit, 2)
    assert max(y for _, y in kept) == max(y for _, y in points)
    assert min(y for _, y in kept) == min(y for _, y in points)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert set(kept) <= set(points)


def test_what_was_not_measured_is_no_point() -> None:
    points = [(0.0, 1.0), (1.0, None), (2.0, math.nan), (3.0, math.inf), (4.0, 2.0)]
    assert finite_points(points) == [(0.0, 1.0), (4.0, 2.0)]


@given(st.floats(-1e14, 1e14))
def test_numbers_for_people_are_short_and_close(value: float) -> None:
    text = number_text(value)
    assert len(text) <= 10
    scale = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1.0)
    number = float(text.rstrip("kMBT")) * scale
    assert number == pytest.approx(value, rel=6e-3, abs=1e-300)
