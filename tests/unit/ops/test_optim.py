from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megacore.ops.optim import (
    AdamWSettings,
    adamw_step_,
    adamw_step_reference_,
    sum_of_squares,
    sum_of_squares_reference,
)

SETTINGS = AdamWSettings(step=3, lr=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1, grad_scale=0.7)


def tensors(numel: int, seed: int = 0) -> list[Tensor]:
    """Random param, grad, exp_avg and exp_avg_sq."""
    random = torch.Generator().manual_seed(seed)
    made = [torch.randn(numel, generator=random) for _ in range(4)]
    made[3].abs_()
    return made


@given(st.integers(0, 300), st.integers(0, 5), st.booleans())
def test_native_step_has_the_bits_of_the_reference(numel: int, skew: int, copy: bool) -> None:
    # A start that is not aligned to a vector must not change the result.
    native = [t[skew:].clone() if skew % 2 else t[skew:] for t in tensors(numel + skew)]
    reference = [t.clone() for t in native]
    native_copy = torch.empty(numel, dtype=torch.bfloat16) if copy else None
    reference_copy = torch.empty(numel, dtype=torch.bfloat16) if copy else None
    adamw_step_(*native, SETTINGS, copy_out=native_copy)
    adamw_step_reference_(*reference, SETTINGS, copy_out=reference_copy)
    for a, b in zip(native, reference, strict=True):
        assert torch.equal(a, b)
    if native_copy is not None and reference_copy is not None:
        assert torch.equal(native_copy, reference_copy)


def test_many_steps_follow_torch_adamw() -> None:
    param, _, exp_avg, exp_avg_sq = tensors(1000)
    exp_avg.zero_()
    exp_avg_sq.zero_()
    theirs = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.AdamW(
        [theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False
    )
    for step in range(1, 21):
        grad = torch.randn(1000, generator=torch.Generator().manual_seed(step))
        settings = AdamWSettings(step=step, lr=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1)
        adamw_step_(param, grad, exp_avg, exp_avg_sq, settings)
        theirs.grad = grad
        optimizer.step()
        torch.testing.assert_close(param, theirs.detach(), rtol=2e-6, atol=2e-7)


def test_threads_do_not_change_the_bits() -> None:
    one, two = tensors(400_001), tensors(400_001)
    adamw_step_(*one, SETTINGS)
    torch.set_num_threads(2)
    try:
        adamw_step_(*two, SETTINGS)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[3], two[3])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_stays_in_its_element(bad: float) -> None:
    values = tensors(10)
    values[1][4] = bad
    adamw_step_(*values, SETTINGS)
    assert torch.isfinite(values[0]).tolist() == [i != 4 for i in range(10)]


def test_shapes_dtypes_and_layouts_are_checked() -> None:
    param, grad, exp_avg, exp_avg_sq = tensors(8)
    with pytest.raises(ValueError, match=r"grad \(7,\) float32 on cpu must be flat"):
        adamw_step_(param, grad[:7], exp_avg, exp_avg_sq, SETTINGS)
    with pytest.raises(ValueError, match=r"exp_avg .*float64.* must be float32"):
        adamw_step_(param, grad, exp_avg.double(), exp_avg_sq, SETTINGS)
    with pytest.raises(ValueError, match="must be contiguous"):
        adamw_step_(param[::2], grad[:4], exp_avg[:4], exp_avg_sq[:4], SETTINGS)
    with pytest.raises(ValueError, match=r"copy_out .* must be bfloat16"):
        adamw_step_(param, grad, exp_avg, exp_avg_sq, SETTINGS, copy_out=torch.empty(8))
    with pytest.raises(ValueError, match="must be flat"):
        adamw_step_(
            param.view(2, 4), grad.view(2, 4), exp_avg.view(2, 4), exp_avg_sq.view(2, 4), SETTINGS
        )


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="step is 0"):
        AdamWSettings(step=0, lr=1.0)
    with pytest.raises(ValueError, match="beta2 is 1"):
        AdamWSettings(step=1, lr=1.0, beta2=1.0)


@given(st.integers(0, 200))
def test_sum_of_squares_agrees_with_the_reference(numel: int) -> None:
    values = tensors(numel, seed=numel)[0]
    expected = math.fsum(x * x for x in values.double().tolist())
    assert sum_of_squares(values).item() == pytest.approx(expected, rel=1e-14)
    assert sum_of_squares_reference(values).item() == pytest.approx(expected, rel=1e-14)
    assert sum_of_squares(values.bfloat16()).dtype == torch.float64


def test_sum_of_squares_is_finite_exactly_if_all_elements_are() -> None:
    values = torch.full((50,), torch.finfo(torch.float32).max)
    assert torch.isfinite(sum_of_squares(values))
    values[17] = math.inf
    assert not torch.isfinite(sum_of_squares(values))
    with pytest.raises(ValueError, match="contiguous"):
        sum_of_squares(values[::2])
