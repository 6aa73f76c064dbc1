from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megacore.optim import learning_rate
from megacore.optim.options import RateOptions
from tests.support.megatron_rates import make_cases

NUM_CASES = 1000
SHAPES = ["cosine", "linear", "constant", "inverse_sqrt", "wsd"]
TAILS = ["linear", "cosine", "exponential", "minus_sqrt"]


def rates(total: int, **fields: object) -> list[float]:
    options = RateOptions(**{"lr": 1.0, "min_lr": 0.1, **fields})  # type: ignore[arg-type]
    return [learning_rate(step, options=options, total=total) for step in range(total)]


def test_warmup_rises_linearly_and_ends_at_the_full_rate() -> None:
    assert rates(10, warmup=4, schedule="constant")[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_warmup_rises_from_a_rate_of_ones_own() -> None:
    found = rates(10, warmup=4, warmup_from=0.2, schedule="constant")
    assert found[:5] == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.0])


def test_cosine_falls_through_the_middle_to_the_minimum_and_stays() -> None:
    found = rates(30, schedule="cosine", warmup=4, decay_end=20)
    assert found[4] == 1.0
    assert found[12] == pytest.approx(0.55)
    assert found[20:] == [0.1] * 10


def test_a_decay_spans_the_run_by_default() -> None:
    options = RateOptions(lr=1.0, schedule="cosine")
    assert learning_rate(50, options=options, total=100) == pytest.approx(0.55)
    assert learning_rate(100, options=options, total=100) == 0.1  # a tenth of lr


def test_wsd_is_flat_and_then_falls_over_its_tail() -> None:
    found = rates(10, schedule="wsd", tail_length=4)
    assert found == pytest.approx([1, 1, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325])
    assert rates(10, schedule="wsd")[7:] == pytest.approx([1, 1, 0.55])  # a fifth
    assert rates(10, schedule="wsd", decay_end=8, tail_length=2)[5:] == pytest.approx(
        [1, 1, 0.55, 0.1, 0.1]
    )
    assert rates(3, schedule="wsd") == [1.0] * 3  # a fifth of 3 steps is none
    # What the warmup leaves, without a jump.
    assert rates(10, schedule="wsd", warmup=9)[8:] == [1.0, 1.0]


# The golden tables: lr 1, min_lr .1, warmup 10, end 100, tail 20, at 0-based steps of Megatron-LM
# or transformers; their first step has a rate of 0. Warmups of ours have the rate of the next step.
AT = (0, 5, 10, 30, 55, 90, 99, 100)
RISE = (0.0, 0.5, 1.0)
GOLDEN: list[tuple[dict[str, Any], tuple[float, ...]]] = [
    ({"schedule": "linear"}, (0.8, 0.55, 0.2, 0.11, 0.1)),
    ({"schedule": "cosine"}, (0.89472, 0.55, 0.127138, 0.100274, 0.1)),
    ({"schedule": "inverse_sqrt"}, (0.57735, 0.426401, 0.333333, 0.317821, 0.316228)),
    ({"schedule": "wsd", "tail_shape": "exponential"}, (1, 1, 0.472792, 0.131738, 0.1)),
    ({"schedule": "wsd", "tail_shape": "minus_sqrt"}, (1, 1, 0.363604, 0.122789, 0.1)),
    ({"schedule": "wsd", "tail_shape": "linear"}, (1, 1, 0.55, 0.145, 0.1)),
    ({"schedule": "wsd", "tail_shape": "cosine"}, (1, 1, 0.55, 0.10554, 0.1)),
    ({"schedule": "linear", "min_lr": 0.0}, (0.777778, 0.5, 0.111111, 0.011111, 0.0)),
    ({"schedule": "cosine", "min_lr": 0.0}, (0.883022, 0.5, 0.030154, 0.000305, 0.0)),
]


@pytest.mark.parametrize("unit", [1, 8, 8 * 4096], ids=["steps", "samples", "tokens"])
@pytest.mark.parametrize(("fields", "after"), GOLDEN)
def test_rates_are_those_of_the_golden_tables(
    fields: dict[str, Any], after: tuple[float, ...], unit: int
) -> None:
    tail = 20 * unit if fields["schedule"] == "wsd" else None
    options = RateOptions(
        **{"lr": 1.0, "min_lr": 0.1, "warmup": 10 * unit, "tail_length": tail, **fields}
    )
    for step, expected in zip(AT, (*RISE, *after), strict=True):
        ours = step - 1 if step <= 10 else step
        if ours >= 0:
            found = learning_rate(ours * unit, options=options, total=100 * unit, step_size=unit)
            assert found == pytest.approx(expected, abs=5e-7)


def test_rates_are_those_of_torchtitan_without_an_offset() -> None:
    # Its table has min_lr .1 and a warmup that starts there in the first step: ours is from 0.
    found = rates(100, warmup=10, schedule="linear")
    assert [found[step] for step in (10, 30, 55, 90, 99)] == pytest.approx(
        [1, 0.8, 0.55, 0.2, 0.11]
    )
    assert found[0] == 0.1


# ---- the code of others --------------------------------------------------------------------------

MEGATRON = {"inverse-square-root": "inverse_sqrt", "WSD": "wsd"}


def test_rates_are_those_of_megatron_core() -> None:
    golden = json.loads((Path(__file__).parents[2] / "golden" / "megatron_rates.json").read_text())
    cases = make_cases()
    assert len(cases) == len(golden) == NUM_CASES
    for case, expected in zip(cases, golden, strict=True):
        style = case["lr_decay_style"]
        options = RateOptions(
            lr=case["max_lr"],
            min_lr=case["min_lr"],
            schedule=MEGATRON.get(style, style),
            warmup=case["lr_warmup_steps"],
            warmup_from=case["init_lr"],
            decay_end=case["lr_decay_steps"],
            tail_length=case["wsd_decay_steps"],
            tail_shape=case["lr_wsd_decay_style"],
        )
        found = [learning_rate(done, options=options, total=1) for done in case["at"]]
        assert found == pytest.approx(expected, rel=1e-8, abs=1e-15 + 1e-9 * case["max_lr"]), case


def transformers_rate(name: str, warmup: int, end: int, **kwargs: Any) -> Callable[[int], float]:
    """Return the rate by step of a scheduler of transformers, for a highest rate of 1."""
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = get_scheduler(name, optimizer, warmup, end, scheduler_specific_kwargs=kwargs)
    rate: Callable[[int], float] = scheduler.lr_lambdas[0]  # type: ignore[attr-defined]
    return rate


KINDS = ["linear", "cosine", "inverse_sqrt", "constant", "wsd linear", "wsd cosine"]


def their_schedule(kind: str, *, low: float, tail: int) -> tuple[str, dict[str, Any]]:
    """Return the name of a schedule in transformers, and its options."""
    if kind.startswith("wsd "):
        shape = kind.removeprefix("wsd ").replace("minus_sqrt", "1-sqrt")
        options = {"num_decay_steps": tail, "min_lr_ratio": low, "decay_type": shape}
        return "warmup_stable_decay", options
    if kind == "cosine":
        return "cosine_with_min_lr", {"min_lr_rate": low}
    return {"constant": "constant_with_warmup"}.get(kind, kind), {}


@pytest.mark.parametrize("kind", [*KINDS, "wsd minus_sqrt"])
def test_rates_are_those_of_transformers(kind: str) -> None:
    draw = random.Random(kind)
    shape, _, tail_shape = kind.partition(" ")
    for _ in range(NUM_CASES):
        warmup = draw.choice((1, draw.randrange(1, 100)))
        end = warmup + draw.randrange(1, 500)
        tail = draw.randrange(1, end - warmup + 1)
        low = draw.choice((0.0, draw.random())) if shape in ("cosine", "wsd") else 0.0
        name, kwargs = their_schedule(kind, low=low, tail=tail)
        theirs = transformers_rate(name, warmup, end, **kwargs)
        options = RateOptions(
            lr=1.0,
            min_lr=low,
            schedule=shape,  # type: ignore[arg-type]
            warmup=warmup,
            warmup_from=low if shape == "wsd" else 0.0,
            tail_length=tail,
            tail_shape=tail_shape or "linear",  # type: ignore[arg-type]
        )
        for done in (0, warmup, end - tail, end - 1, *(draw.randrange(end) for _ in range(3))):
            expected = theirs(done + 1 if done < warmup else done)
            found = learning_rate(done, options=options, total=end)
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-12), (options, end, done)


def torchtitan_rate(
    step: int, *, warmup: int, total: int, decay: int, shape: str, low: float
) -> float:
    """Return torchtitan's factor on the rate, from the formula of its schedules."""
    stable = total + 1 - warmup - decay
    if step < warmup:
        return (step + 1) / warmup
    if step < warmup + stable:
        return 1.0
    x = (step + 1 - warmup - stable) / decay
    height = {
        "linear": 1 - x,
        "sqrt": 1 - math.sqrt(x),
        "cosine": 0.5 * (1 + math.cos(math.pi * x)),
    }[shape]
    return low + (1 - low) * height


@pytest.mark.parametrize("shape", ["linear", "sqrt", "cosine"])
def test_rates_are_those_of_torchtitan(shape: str) -> None:
    draw = random.Random(shape)
    for _ in range(NUM_CASES):
        warmup, low = draw.randrange(0, 100), draw.random()
        total = warmup + draw.randrange(2, 500)
        decay = draw.choice((total - warmup, draw.randrange(1, total - warmup)))
        options = RateOptions(
            lr=1.0,
            min_lr=low,
            schedule="wsd",
            warmup=warmup,
            tail_length=decay,
            tail_shape="minus_sqrt" if shape == "sqrt" else shape,  # type: ignore[arg-type]
        )
        for step in (0, warmup, total - decay, total - 1, draw.randrange(total)):
            found = learning_rate(step, options=options, total=total)
            expected = torchtitan_rate(
                step, warmup=warmup, total=total, decay=decay, shape=shape, low=low
            )
            assert found == pytest.approx(expected, rel=1e-9)


# ---- properties ----------------------------------------------------------------------------------


@given(
    st.sampled_from(SHAPES),
    st.sampled_from(TAILS),
    st.integers(1, 60),
    st.integers(0, 70),
    st.one_of(st.none(), st.integers(1, 70)),
    st.one_of(st.none(), st.integers(0, 70)),
)
def test_the_rate_never_leaves_its_bounds_and_falls_after_the_warmup(
    schedule: str, shape: str, steps: int, warmup: int, end: int | None, tail: int | None
) -> None:
    lengths = {"warmup": warmup, "decay_end": end, "tail_length": tail}
    found = rates(steps, schedule=schedule, tail_shape=shape, **lengths)
    assert all(0.0 < rate <= 1.0 for rate in found)
    after = found[warmup:]
    assert all(rate >= 0.1 for rate in after)
    assert after == sorted(after, reverse=True)


@given(
    st.sampled_from(SHAPES),
    st.integers(1, 60),
    st.integers(0, 40),
    st.integers(1, 7),
)
def test_the_unit_of_the_lengths_changes_no_rate(
    schedule: str, steps: int, warmup: int, size: int
) -> None:
    in_steps = rates(steps, schedule=schedule, warmup=warmup, tail_length=steps // 3)
    options = RateOptions(
        lr=1.0,
        min_lr=0.1,
        schedule=schedule,  # type: ignore[arg-type]
        warmup=warmup * size,
        tail_length=steps // 3 * size,
    )
    in_samples = [
        learning_rate(step * size, options=options, total=steps * size, step_size=size)
        for step in range(steps)
    ]
    assert in_samples == pytest.approx(in_steps, rel=1e-12)


def test_positions_outside_the_run_are_refused() -> None:
    options = RateOptions(lr=1.0)
    with pytest.raises(ValueError, match="got done = -1"):
        learning_rate(-1, options=options, total=10)
    with pytest.raises(ValueError, match="total = 0"):
        learning_rate(0, options=options, total=0)
