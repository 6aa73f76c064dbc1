from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from megacore.ops import gelu, swiglu
from megacore.ops.activations import gelu_reference, swiglu_reference

PAIRS = {"swiglu": (swiglu, swiglu_reference, 2), "gelu": (gelu, gelu_reference, 1)}


def run(op: Any, x: Tensor, probs: Tensor | None, grad: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    probs = None if probs is None else probs.clone().requires_grad_()
    y = op(x, probs)
    y.backward(grad)
    assert x.grad is not None
    found = [y.detach(), x.grad]
    if probs is not None:
        assert probs.grad is not None
        found.append(probs.grad)
    return found


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(PAIRS)),
    rows=st.integers(0, 9),
    width=st.sampled_from([1, 2, 15, 16, 17, 31, 255, 256, 257, 600]),
    weighted=st.booleans(),
    low=st.booleans(),
    size=st.sampled_from([0.1, 3.0, 60.0]),
    seed=st.integers(0, 2**32),
)
def test_native_kernels_equal_float64(
    name: str, rows: int, width: int, weighted: bool, low: bool, size: float, seed: int
) -> None:
    op, reference, factor = PAIRS[name]
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if low else torch.float32
    x = (torch.randn(rows, factor * width, generator=generator) * size).to(dtype)
    grad = torch.randn(rows, width, generator=generator).to(dtype)
    probs = torch.rand(rows, generator=generator) if weighted else None
    exact = run(reference, x.double(), None if probs is None else probs.double(), grad.double())
    for found, expected in zip(run(op, x, probs, grad), exact, strict=True):
        if found.numel() == 0:
            continue
        # Against the largest value: gradients cross zero, where relative errors mean nothing.
        limit = (1e-2 if found.dtype == torch.bfloat16 else 2e-6) * expected.abs().max()
        assert (found.double() - expected).abs().max() <= limit


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_extreme_inputs_stay_exact(name: str) -> None:
    op, _, factor = PAIRS[name]
    x = torch.tensor([[1e4, -1e4, 0.0, -88.5, 88.5, 3e38]])
    y = op(torch.cat([x, torch.ones_like(x)], 1) if factor == 2 else x)
    assert y[0, [0, 4, 5]].tolist() == x[0, [0, 4, 5]].tolist()
    assert y[0, 2] == 0.0
    assert y[0, [1, 3]].abs().max() < 1e-30
    poisoned = torch.full((1, 4), torch.nan)
    assert op(poisoned).isnan().all()


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_torch_can_trace_and_differentiate_the_operations(name: str) -> None:
    op, _, _ = PAIRS[name]
    x = torch.randn(4, 6, requires_grad=True)
    probs = torch.rand(4, requires_grad=True)
    for p in (probs, None):
        opcheck(getattr(torch.ops.megacore, name).default, (x, p))
    grad = torch.randn(op(x).shape)
    backward = getattr(torch.ops.megacore, f"{name}_backward").default
    opcheck(backward, (grad, x.detach(), probs.detach()))
    opcheck(backward, (grad, x.detach(), None))
    wide = x.detach().double().requires_grad_(), probs.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(op, wide)


def test_mistakes_are_explained() -> None:
    with pytest.raises(ValueError, match=r"must be \(M, 2F\)"):
        swiglu(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"probs .* must be \(2,\)"):
        gelu(torch.zeros(2, 3), torch.zeros(3))
