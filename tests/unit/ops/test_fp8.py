"""8-bit operands: rounding, scales, products and their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megacore.ops.fp8 import fp8_grouped_gemm, fp8_linear
from megacore.ops.quantize import (
    BLOCK,
    quantize_blocks,
    quantize_columns,
    quantize_rows,
    row_blocks,
)


def _rounded(x: Tensor) -> Tensor:
    """Round a block with one scale by its definition, element by element."""
    largest = x.abs().max().item()
    scale = largest / 448.0
    if scale == 0.0:
        return torch.zeros_like(x)

    def rounded(value: float) -> float:
        magnitude = abs(value) / scale
        exponent = max(math.floor(math.log2(magnitude)), -6) if magnitude > 0 else -6
        step = 2.0 ** (exponent - 3)
        return math.copysign(round(magnitude / step) * step * scale, value)

    return torch.tensor([rounded(value) for value in x.flatten().tolist()]).view(x.shape)


def _by_blocks(x: Tensor, height: int, width: int) -> Tensor:
    result = x.clone()
    for row in range(0, x.shape[0], height):
        for column in range(0, x.shape[1], width):
            block = x[row : row + height, column : column + width]
            result[row : row + height, column : column + width] = _rounded(block)
    return result


def _near(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 128), (130, 200), (5, 257)])
def test_rounding_is_that_of_the_format(rows: int, width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, width) * torch.logspace(-3, 3, width)
    values, scales = quantize_rows(x)
    wide = scales.repeat_interleave(BLOCK, 1)[:, :width]
    _near(values.float() * wide, _by_blocks(x, 1, BLOCK))
    values, scales = quantize_blocks(x[None])
    wide = scales[0].repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :width]
    _near(values[0].float() * wide, _by_blocks(x, BLOCK, BLOCK))
    blocks = torch.arange(rows) // BLOCK
    values, scales = quantize_columns(x)
    _near(values.float() * scales[blocks], _by_blocks(x, BLOCK, 1))


@given(
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=300),
    st.integers(-20, 20),
)
def test_error_is_bounded_and_scales_with_the_values(data: list[float], power: int) -> None:
    x = torch.tensor([data])
    values, scales = quantize_rows(x)
    wide = scales.repeat_interleave(BLOCK, 1)[:, : len(data)]
    again = values.float() * wide
    bound = torch.maximum(x.abs() * 2.0**-4, wide * 2.0**-10) * (1 + 1e-5)
    assert ((again - x).abs() <= bound).all()
    if x.abs().max() > 1e-20 and x.abs().max() < 1e20:
        shifted, shifted_scales = quantize_rows(x * 2.0**power)
        tiny = x.abs() < 1e-25  # of which a power of two may not be exact
        assert torch.equal(shifted.float()[~tiny], values.float()[~tiny])
        assert torch.equal(shifted_scales.amax(), scales.amax() * 2.0**power)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_with_a_number_that_is_not_finite_becomes_nan(bad: float) -> None:
    x = torch.ones(2, 2 * BLOCK)
    x[1, 3] = bad
    values, scales = quantize_rows(x)
    again = values.float() * scales.repeat_interleave(BLOCK, 1)
    assert again[1, :BLOCK].isnan().all()
    assert torch.equal(again[0], x[0])
    assert torch.equal(again[1, BLOCK:], x[1, BLOCK:])
    assert fp8_linear(x, torch.ones(4, 2 * BLOCK))[1].isnan().all()


def test_zeros_and_tiny_values_stay_finite() -> None:
    for x in (torch.zeros(2, 5), torch.full((2, 5), 1e-44)):
        values, scales = quantize_rows(x)
        assert (values.float() * scales).isfinite().all()


@pytest.mark.parametrize(("rows", "width", "outputs"), [(3, 16, 8), (150, 200, 136)])
def test_products_have_8_bit_operands(rows: int, width: int, outputs: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(rows, width, requires_grad=True)
    w = torch.randn(outputs, width, requires_grad=True)
    bias = torch.randn(outputs, requires_grad=True)
    grad = torch.randn(rows, outputs)
    y = fp8_linear(x[None], w, bias)[0]
    grads = torch.autograd.grad(y, (x, w, bias), grad)
    wide_w = _by_blocks(w.detach(), BLOCK, BLOCK)
    expected = (
        _by_blocks(grad, 1, BLOCK) @ wide_w,
        _by_blocks(grad, BLOCK, 1).t() @ _by_blocks(x.detach(), BLOCK, 1),
        grad.sum(0),
    )
    _near(y, _by_blocks(x.detach(), 1, BLOCK) @ wide_w.t() + bias)
    for found, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("splits", [[5, 0, 131, 7], [0, 0, 0, 0], [256, 1, 1, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_separate_products(splits: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    padding = 3
    x = torch.randn(sum(splits) + padding, 40).to(dtype)
    x[sum(splits) :] = math.nan  # never read
    x.requires_grad_()
    w = torch.randn(4, 24, 40).to(dtype).requires_grad_()
    grad = torch.randn(len(x), 24).to(dtype)
    main_grad = torch.ones(w.shape)
    y = fp8_grouped_gemm(x, w, torch.tensor(splits))
    grad_x, grad_w = torch.autograd.grad(y, (x, w), grad, retain_graph=True)
    fp8_grouped_gemm(x, w, torch.tensor(splits), main_grad=main_grad).backward(grad)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {}
    start = 0
    for expert, num in enumerate(splits):
        rows = slice(start, start + num)
        own_x, own_w = x[rows].detach().requires_grad_(), w[expert].detach().requires_grad_()
        own = fp8_linear(own_x, own_w)
        expected = torch.autograd.grad(own, (own_x, own_w), grad[rows])
        torch.testing.assert_close(y[rows], own, **tolerance)
        torch.testing.assert_close(grad_x[rows], expected[0], **tolerance)
        torch.testing.assert_close(grad_w[expert], expected[1], **tolerance)
        start += num
    torch.testing.assert_close((main_grad - 1).to(dtype), grad_w, rtol=2e-2, atol=2e-2)
    assert (y[start:] == 0).all()
    assert (grad_x[start:] == 0).all()


def test_blocks_of_rows_never_hold_two_experts() -> None:
    splits = torch.tensor([1, 300, 0, 128, 129])
    blocks, num_blocks = row_blocks(splits, 600)
    experts = torch.repeat_interleave(torch.arange(6), torch.cat((splits, torch.tensor([42]))))
    for block in blocks.unique():
        rows = (blocks == block).nonzero().flatten()
        assert len(experts[rows].unique()) == 1
        assert len(rows) <= BLOCK or experts[rows[0]] == 5
    assert blocks[:-42].max() < num_blocks
    assert (blocks[-42:] == num_blocks).all()


def test_fake_products_have_the_shapes_of_the_real_ones() -> None:
    splits = torch.tensor([130, 4])
    x, w, grad = torch.randn(140, 16), torch.randn(2, 24, 16), torch.randn(140, 24)
    factors = *quantize_rows(x), *quantize_blocks(w)
    columns = *quantize_columns(grad, splits), *quantize_columns(x, splits)
    checks = "test_faketensor"  # the check of schemas has no product of 8-bit floats
    for dtype in (torch.float32, torch.bfloat16):
        args = *factors, splits, dtype, True, 0
        torch.library.opcheck(torch.ops.megacore.fp8_product.default, args, test_utils=checks)
        out = torch.zeros(2, 24, 16)
        args = *columns, splits, 140, dtype, out, True, 0
        torch.library.opcheck(torch.ops.megacore.fp8_weight_grad_.default, args, test_utils=checks)


def test_inputs_are_kept_in_8_bits() -> None:
    kept: list[Tensor] = []
    x, w = torch.randn(256, 512, requires_grad=True), torch.randn(8, 512, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    )
    with hooks:
        fp8_linear(x, w)
    num_bytes = sum(t.nbytes for t in kept if t.data_ptr() != w.data_ptr())
    assert x.numel() < num_bytes < 1.1 * x.numel()
