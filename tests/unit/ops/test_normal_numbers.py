"""Normal numbers by counter against the formula in float64, and their distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megacore.ops.counter_random import fill_normal, fill_uniform

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def by_formula(key: int, index: int) -> float:
    number = mixed((mixed(key) + (index // 2 + 1) * _GOLDEN) & _MASK)
    radius = math.sqrt(-2.0 * math.log(((number >> 40) + 1) * 2.0**-24))
    angle = 2.0 * math.pi * (number & 0xFFFFFFFF) / 2**32
    return radius * (math.sin(angle) if index % 2 else math.cos(angle))


def numbers(count: int, *, key: int = 7, first: int = 0) -> torch.Tensor:
    out = torch.empty(1, count)
    fill_normal(out, key=key, first=first, stride=0, std=1.0)
    return out[0]


@pytest.mark.parametrize("key", [0, 123, 2**64 - 1])
@pytest.mark.parametrize("first", [0, 5, 2**40 + 1])
def test_numbers_are_those_of_the_formula(key: int, first: int) -> None:
    expected = [by_formula(key, first + i) for i in range(5_000)]
    assert numbers(5_000, key=key, first=first).numpy() == pytest.approx(expected, abs=1e-6)


def test_moments_and_correlations_are_those_of_a_normal_distribution() -> None:
    count = 4_000_000
    x = numbers(count).double().numpy()
    # Each within five standard errors: the variance of x**k is E x**2k - (E x**k)**2.
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10_170)):
        assert (x**power).mean() == pytest.approx(mean, abs=5 * math.sqrt(variance / count))
    for lag in (1, 2, 3, 1024):
        assert np.corrcoef(x[:-lag], x[lag:])[0, 1] == pytest.approx(0, abs=5 / math.sqrt(count))
    pairs = np.corrcoef(x[::2] ** 2, x[1::2] ** 2)[0, 1]
    assert pairs == pytest.approx(0, abs=5 / math.sqrt(count / 2))
    for bound in (0.5, 1.0, 2.0, 3.0, 4.0):
        share = math.erfc(bound / math.sqrt(2))
        found = (np.abs(x) > bound).mean()
        assert found == pytest.approx(share, abs=5 * math.sqrt(share / count))


def test_the_number_of_threads_changes_no_bit() -> None:
    before, one = torch.get_num_threads(), numbers(300_001, first=3)
    try:
        torch.set_num_threads(3)
        assert torch.equal(numbers(300_001, first=3), one)
    finally:
        torch.set_num_threads(before)


def test_a_wrong_output_is_refused() -> None:
    with pytest.raises(ValueError, match="out must have 2 dimensions, got 1"):
        fill_normal(torch.empty(3), key=1, first=0, stride=0, std=1.0)
    with pytest.raises(ValueError, match="at least 0, got 1, 3, -1 and 0"):
        fill_normal(torch.empty(1, 3), key=1, first=-1, stride=0, std=1.0)
    for wrong in (torch.empty(1, 3, dtype=torch.float64), torch.empty(4, 4).t()[:, :2]):
        with pytest.raises(TypeError):
            fill_normal(wrong, key=1, first=0, stride=0, std=1.0)


def test_uniform_numbers_depend_on_their_index_alone_and_have_the_spread() -> None:
    whole, part = torch.empty(1, 400_000), torch.empty(3, 7)
    fill_uniform(whole, key=9, first=0, stride=0, std=0.5)
    fill_uniform(part, key=9, first=11, stride=20, std=0.5)
    for row in range(3):
        assert torch.equal(part[row], whole[0, 11 + 20 * row :][:7])
    bound = math.sqrt(3.0) * 0.5
    assert whole.abs().max() < bound
    assert whole.min() < -0.9999 * bound
    assert whole.max() > 0.9999 * bound
    assert whole.mean().item() == pytest.approx(0.0, abs=0.005)
    assert whole.std().item() == pytest.approx(0.5, rel=0.005)
