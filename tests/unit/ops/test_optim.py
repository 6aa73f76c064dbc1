from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megacore.ops.optim import (
    AdamWSettings,
    StepRules,
    adamw_step_,
    adamw_step_reference_,
    decide_step_,
    decide_step_reference_,
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


COPIES = st.sampled_from([None, torch.bfloat16, torch.float16])


@given(st.integers(0, 300), st.integers(0, 5), COPIES)
def test_native_step_has_the_bits_of_the_reference(
    numel: int, skew: int, copy: torch.dtype | None
) -> None:
    # A start that is not aligned to a vector must not change the result.
    native = [t[skew:].clone() if skew % 2 else t[skew:] for t in tensors(numel + skew)]
    reference = [t.clone() for t in native]
    native_copy = None if copy is None else torch.empty(numel, dtype=copy)
    reference_copy = None if copy is None else torch.empty(numel, dtype=copy)
    adamw_step_(*native, SETTINGS, copy_out=native_copy)
    adamw_step_reference_(*reference, SETTINGS, copy_out=reference_copy)
    for a, b in zip(native, reference, strict=True):
        assert torch.equal(a, b)
    if native_copy is not None and reference_copy is not None:
        assert torch.equal(native_copy, reference_copy)


def copied(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What a step that changes nothing writes as the narrow copy of its parameters."""
    param, copy_out = values.clone(), torch.empty(values.shape, dtype=dtype)
    zeros = [torch.zeros_like(param) for _ in range(3)]
    adamw_step_(param, *zeros, AdamWSettings(step=1, lr=0.0), copy_out=copy_out)
    assert torch.equal(param.view(torch.int32), values.view(torch.int32))
    return copy_out


def all_of(dtype: torch.dtype) -> Tensor:
    """Every finite number of 16 bits, widened."""
    values = torch.arange(1 << 16).to(torch.uint16).view(dtype).float()
    return values[values.isfinite()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_are_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    # Every number of the narrow format, all that lies half way between two neighbours, and what is
    # next to these: where overflow begins and where numbers become subnormal or zero among them.
    exact = all_of(dtype)
    ordered = torch.sort(exact).values
    half_way = (ordered[1:].double() + ordered[:-1].double()).div(2).float()
    limit = torch.tensor([ordered[-1].item() * (1 + 2.0**-12), 65519.996, 65520.0, 3.4e38])
    middle = torch.cat([exact, half_way, limit, -limit])
    up = torch.nextafter(middle, torch.tensor(math.inf))
    down = torch.nextafter(middle, torch.tensor(-math.inf))
    values = torch.cat([middle, up, down])
    values = values[values.isfinite()]
    assert torch.equal(copied(values, dtype).view(torch.int16), values.to(dtype).view(torch.int16))


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=40))
def test_any_number_is_copied_as_torch_rounds_it(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    values = values[values.isfinite()]  # an infinite parameter turns into NaN in a step
    for dtype in (torch.bfloat16, torch.float16):
        expected = values.to(dtype).view(torch.int16)
        assert torch.equal(copied(values, dtype).view(torch.int16), expected)


def test_a_parameter_that_is_not_finite_is_copied_as_such() -> None:
    # From 65520 on there is no float16 left; a NaN stays one.
    param = torch.tensor([65519.0, 65520.0, -1e6, math.nan])
    zeros = [torch.zeros(4) for _ in range(3)]
    copy_out = torch.zeros(4, dtype=torch.float16)
    adamw_step_(param, *zeros, AdamWSettings(step=1, lr=0.0), copy_out=copy_out)
    assert copy_out.tolist()[:3] == [65504.0, math.inf, -math.inf]
    assert math.isnan(copy_out[3].item())


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
    with pytest.raises(ValueError, match=r"grad \(7,\) must be flat"):
        adamw_step_(param, grad[:7], exp_avg, exp_avg_sq, SETTINGS)
    with pytest.raises(ValueError, match=r"exp_avg \(8,\) must be float32"):
        adamw_step_(param, grad, exp_avg.double(), exp_avg_sq, SETTINGS)
    with pytest.raises(ValueError, match="must be contiguous"):
        adamw_step_(param[::2], grad[:4], exp_avg[:4], exp_avg_sq[:4], SETTINGS)
    with pytest.raises(ValueError, match=r"copy_out .* must be bfloat16 or float16"):
        adamw_step_(param, grad, exp_avg, exp_avg_sq, SETTINGS, copy_out=torch.empty(8))
    with pytest.raises(ValueError, match="must be flat"):
        adamw_step_(
            param.view(2, 4), grad.view(2, 4), exp_avg.view(2, 4), exp_avg_sq.view(2, 4), SETTINGS
        )


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="step is 0"):
        AdamWSettings(step=0, lr=1.0)
    with pytest.raises(ValueError, match=r"beta2 must be .*, got 1"):
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


def decisions(*, bad: bool, tokens: float) -> tuple[torch.Tensor, torch.Tensor]:
    state = torch.tensor([6.0, 2.0, 8.0, 1.0], dtype=torch.float64)
    sums = torch.tensor([0.0 if bad else 1234.5, float(bad), tokens, 7.0], dtype=torch.float64)
    return state, sums


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("clip_grad", [0.0, 0.5, 1e9])
@pytest.mark.parametrize("interval", [0, 2, 100])
@pytest.mark.parametrize("num_averaged", [0, 4])
def test_decisions_are_those_of_the_reference(
    bad: bool, clip_grad: float, interval: int, num_averaged: int
) -> None:
    rules = StepRules(
        beta1=0.9,
        beta2=0.95,
        clip_grad=clip_grad,
        loss_scale_interval=interval,
        num_averaged=num_averaged,
    )
    state, sums = decisions(bad=bad, tokens=100.0)
    other_state = state.clone()
    control, other = (torch.full((6,), 0.25, dtype=torch.float64) for _ in range(2))
    decide_step_(state, sums, control, rules)
    decide_step_reference_(other_state, sums, other, rules)
    assert torch.equal(state, other_state)
    torch.testing.assert_close(control, other, rtol=1e-14, atol=0.0, equal_nan=True)
    assert bool(control[3]) is not bad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", [adamw_step_, adamw_step_reference_])
def test_a_decision_replaces_the_settings(step: Callable[..., None], dtype: torch.dtype) -> None:
    plain, controlled = tensors(1003, seed=1), tensors(1003, seed=1)
    settings = AdamWSettings(step=7, lr=1e-2, beta1=0.9, beta2=0.95, grad_scale=0.25)
    decided = [0.25, settings.bias_correction1, settings.bias_correction2, 1.0, 3.0, 2e-2]
    control = torch.tensor(decided, dtype=torch.float64)
    adamw_step_(*plain, settings)
    other = replace(settings, step=1, grad_scale=99.0, lr=0.5)
    copy_out = torch.zeros(1003, dtype=dtype)
    step(*controlled, other, control=control, copy_out=copy_out)
    for a, b in zip(plain, controlled, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(copy_out, controlled[0].to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", [adamw_step_, adamw_step_reference_])
def test_a_step_that_is_called_off_changes_nothing(
    step: Callable[..., None], dtype: torch.dtype
) -> None:
    values = tensors(100, seed=2)
    values[1][3] = math.nan
    before = [value.clone() for value in values]
    copy_out = torch.full((100,), 5.0, dtype=dtype)
    control = torch.tensor([1.0, 0.1, 0.1, 0.0, math.nan, 1.0], dtype=torch.float64)
    step(*values, SETTINGS, control=control, copy_out=copy_out)
    for a, b in zip(values, before, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=0.0, equal_nan=True)
    assert torch.equal(copy_out, torch.full((100,), 5.0, dtype=dtype))


def test_numbers_of_a_decision_are_checked() -> None:
    state, sums = decisions(bad=False, tokens=0.0)
    rules = StepRules(beta1=0.9, beta2=0.95)
    with pytest.raises(ValueError, match=r"control \(6,\) must be a flat float64 tensor of 6"):
        decide_step_(state, sums, torch.empty(6), rules)
    with pytest.raises(ValueError, match=r"sums .* of 3 numbers"):
        decide_step_(state, sums[:2], torch.empty(6).double(), rules)
    with pytest.raises(ValueError, match=r"control .* of 6 numbers"):
        adamw_step_(*tensors(8, seed=1), SETTINGS, control=torch.empty(5).double())


def test_autograd_notices_a_weight_that_a_step_has_written() -> None:
    param, grad, exp_avg, exp_avg_sq = tensors(8)
    weight = torch.zeros(8, dtype=torch.bfloat16)
    y = weight * torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    adamw_step_(param, grad, exp_avg, exp_avg_sq, SETTINGS, copy_out=weight)
    assert min(x._version for x in (param, exp_avg, exp_avg_sq)) > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
