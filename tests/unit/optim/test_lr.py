from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.optim import learning_rate
from megacore.optim.options import RateOptions


def rates(steps: int, **fields: object) -> list[float]:
    options = RateOptions(**{"lr": 1.0, "min_lr": 0.1, **fields})  # type: ignore[arg-type]
    return [learning_rate(step, options=options, steps=steps) for step in range(steps)]


def test_warmup_rises_linearly_and_ends_at_the_full_rate() -> None:
    assert rates(10, warmup_steps=4, schedule="constant")[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_falls_through_the_middle_to_the_minimum_and_stays() -> None:
    found = rates(30, schedule="cosine", warmup_steps=4, decay_steps=20)
    assert found[4] == 1.0
    assert found[12] == pytest.approx(0.55)
    assert found[20:] == [0.1] * 10


def test_cosine_spans_the_run_by_default() -> None:
    options = RateOptions(lr=1.0, schedule="cosine")
    assert learning_rate(50, options=options, steps=100) == pytest.approx(0.55)
    assert learning_rate(100, options=options, steps=100) == 0.1  # a tenth of lr


def test_wsd_is_flat_and_then_falls_linearly_to_the_last_step() -> None:
    found = rates(10, schedule="wsd", decay_steps=4)
    assert found == pytest.approx([1, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1])
    assert rates(10, schedule="wsd")[7:] == pytest.approx([1, 0.55, 0.1])
    assert rates(3, schedule="wsd") == [1.0] * 3  # a fifth of 3 steps is none


@given(
    st.sampled_from(["cosine", "wsd", "constant"]),
    st.integers(1, 60),
    st.integers(0, 70),
    st.one_of(st.none(), st.integers(0, 70)),
)
def test_the_rate_never_leaves_its_bounds_and_falls_after_the_warmup(
    schedule: str, steps: int, warmup: int, decay: int | None
) -> None:
    found = rates(steps, schedule=schedule, warmup_steps=warmup, decay_steps=decay)
    assert all(0.0 < rate <= 1.0 for rate in found)
    after = found[warmup:]
    assert all(rate >= 0.1 for rate in after)
    assert after == sorted(after, reverse=True)


def test_steps_outside_the_run_are_refused() -> None:
    options = RateOptions(lr=1.0)
    with pytest.raises(ValueError, match="step is -1"):
        learning_rate(-1, options=options, steps=10)
    with pytest.raises(ValueError, match="0 steps"):
        learning_rate(0, options=options, steps=0)
