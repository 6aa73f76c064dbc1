"""Experts on rows of a buffer that is larger than what arrived."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from megacore.moe.dispatchers import ExpertRows
from megacore.moe.experts import Activation, ExpertBiases, GroupedExperts

SPLITS = torch.tensor([5, 0, 3])
HIDDEN, WIDTH, CAPACITY = 16, 24, 40


@pytest.fixture(autouse=True)
def _new_memory_is_nan() -> Iterator[None]:
    try:
        torch.use_deterministic_algorithms(True)
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def experts(activation: Activation, dtype: torch.dtype, *, kind: str) -> GroupedExperts:
    torch.manual_seed(3)
    inner = (WIDTH,) if activation == "gelu" else (2, WIDTH)
    biases = None
    if kind == "biases":
        fc1_bias, fc2_bias = torch.randn(3, *inner), torch.randn(3, HIDDEN)
        biases = ExpertBiases(nn.Parameter(fc1_bias), nn.Parameter(fc2_bias), num_shards=1)
    return GroupedExperts(
        nn.Parameter(torch.randn(3, *inner, HIDDEN).to(dtype)),
        nn.Parameter(torch.randn(3, HIDDEN, WIDTH).to(dtype)),
        activation=activation,
        biases=biases,
        fp8=kind == "fp8",
    )


def run(layer: GroupedExperts, num_padding: int, dtype: torch.dtype) -> list[Tensor]:
    """Result and gradients of the rows of experts, with padding of NaN behind them."""
    torch.manual_seed(4)
    used = int(SPLITS.sum())

    def padded(values: Tensor) -> Tensor:
        tail = values.new_full((num_padding, *values.shape[1:]), torch.nan)
        return torch.cat((values, tail)).requires_grad_()

    rows, probs = padded(torch.randn(used, HIDDEN).to(dtype)), padded(torch.rand(used))
    arrived = ExpertRows(
        rows=rows,
        probs=probs,
        m_splits=SPLITS,
        row_map=None,
        num_rows=SPLITS.sum() if num_padding else None,
    )
    y = layer(arrived)
    grad = padded(torch.randn(used, HIDDEN).to(dtype)).detach()
    grads = torch.autograd.grad(y, (rows, probs, *layer.parameters()), grad)
    return [y[:used], grads[0][:used], grads[1][:used], *grads[2:]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "biases", "fp8"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "clamped_swiglu"])
def test_what_lies_behind_the_rows_changes_no_bit(
    activation: Activation, kind: str, dtype: torch.dtype
) -> None:
    layer = experts(activation, dtype, kind=kind)
    expected = run(layer, 0, dtype)
    assert all(bool(value.isfinite().all()) for value in expected)
    for found, exact in zip(run(layer, CAPACITY - 8, dtype), expected, strict=True):
        assert torch.equal(found, exact)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_rows_of_nobody_are_not_computed(activation: Activation) -> None:
    layer = experts(activation, torch.float32, kind="plain")
    rows, probs = torch.zeros(CAPACITY, HIDDEN), torch.zeros(CAPACITY)
    arrived = {"rows": rows, "probs": probs, "m_splits": SPLITS, "row_map": None}
    used = int(SPLITS.sum())
    assert layer(ExpertRows(**arrived)).count_nonzero() == 0
    y = layer(ExpertRows(**arrived, num_rows=SPLITS.sum()))
    assert y[:used].count_nonzero() == 0
    assert y[used:].isnan().all()
